"""Memory, and costs of programs for TPU: a replay of texts whose costs are known, and schedules of kernels."""

import textwrap
import types
from collections import Counter

import pytest

from spectr_jax.aot import kernels
from spectr_jax.aot.cost import Cost, Program
from spectr_jax.aot.hlo_report import Memory
from spectr_jax.aot.kernels import schedule_cycles
from spectr_jax.aot.tpu_slices import Chip

# A cycle is a millisecond, and so is a KiB from memory; between devices a millisecond moves 512 bytes.
_CHIP = Chip(memory=2**20, peak_flops=1e6, clock=1e3, memory_bandwidth=2**10 * 1e3, link_bandwidth=2**9 * 1e3)


def _op(name, cycles, *, scope='', operands='%p'):
  path = f', metadata={{op_name="jit(f)/{scope}"}}' if scope else ''
  return (
    f'%{name} = f32[8]{{0}} fusion({operands}), kind=kLoop, calls=%x{path}, '
    f'backend_config={{"estimated_cycles":"{cycles}"}}'
  )


# As XLA writes programs for TPU, shortened.
_PROGRAM = textwrap.dedent(f"""
  HloModule jit_f

  %inner.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
    {_op('a', 10)}
  }}

  %body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
    {_op('b', 100)}
    %w = (s32[], f32[8]) while(%b), condition=%c, body=%inner.1, metadata={{op_name="jit(f)/vmap(path)/while/body/search/while"}}
  }}

  %known (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
    {_op('k', 1000)}
  }}

  %cheap (p: f32[8]) -> f32[8] {{
    {_op('l', 1)}
  }}

  ENTRY %main.9_spmd (p: f32[8]) -> f32[8] {{
    {_op('m', 10000)}
    %v = (s32[], f32[8]) while(%m), condition=%c, body=%body.1, metadata={{op_name="jit(f)/vmap(path)/while"}}
    %n = (s32[], f32[8]) while(%v), condition=%c, body=%known, metadata={{op_name="jit(f)/while"}}, backend_config={{"known_trip_count":{{"n":"5"}}}}
    %o = f32[8]{{0}} conditional(%n, %p, %p), branch_computations={{%known, %cheap}}, metadata={{op_name="jit(f)/filters/cond"}}
  }}
""")  # noqa: E501


def _entry(*lines):
  return '\n'.join(['ENTRY %main (p: f32[8]) -> f32[8] {', *('  ' + line for line in lines), '}'])


def _cycles(text=_PROGRAM, *, loop=None, **options):
  return Program(text, _CHIP, **options).total(loop=loop).cycles


def test_loops_count_once_per_iteration():
  assert _cycles() == 10000 + (100 + 10) + 5 * 1000 + 1
  assert _cycles(trips={'path': 3}) == 10000 + 3 * (100 + 10) + 5 * 1000 + 1
  # A scope applies to the loop directly within it, not to loops inside of that one.
  assert _cycles(trips={'path': 3, 'search': 4}) == 10000 + 3 * (100 + 4 * 10) + 5 * 1000 + 1
  # One iteration of a loop alone.
  assert _cycles(trips={'search': 4}, loop='path') == 100 + 4 * 10
  assert _cycles(loop='elsewhere') == 0


def test_loops_of_unknown_length_are_named():
  for trips, uncounted in (({'search': 4}, {'jit(f)/vmap(path)/while'}), ({'search': 4, 'path': 3}, set())):
    program = Program(_PROGRAM, _CHIP, trips=trips)
    program.total()
    assert program.uncounted == uncounted


def test_a_branch_is_the_cheapest_one_unless_asked_for():
  assert _cycles(dearest=['filters']) - _cycles(dearest=['else']) == 1000 - 1


_CONDITIONS = {
  'plain': """
  %c (p: (s32[], f32[8])) -> pred[] {
    %constant.1 = s32[]{:T(128)} constant(6)
    %i = s32[] get-tuple-element(%p), index=0
    ROOT %lt = pred[] compare(%i, %constant.1), direction=LT
  }""",
  'fused': """
  %wrapped_compare (param_0: s32[], param_1: s32[]) -> pred[] {
    %param_0 = s32[] parameter(0)
    %param_1 = s32[] parameter(1)
    ROOT %lt.2 = pred[] compare(%param_0, %param_1), direction=LT
  }

  %c (p: (s32[], f32[8])) -> pred[] {
    %constant.1 = s32[]{:T(128)} constant(6)
    %i = s32[] get-tuple-element(%p), index=0
    ROOT %fusion.7 = pred[] fusion(%i, %constant.1), kind=kLoop, calls=%wrapped_compare
  }""",
  'with an early end': """
  %c (p: (s32[], f32[8])) -> pred[] {
    %constant.1 = s32[]{:T(128)} constant(6)
    %constant.2 = f32[] constant(9)
    %i = s32[] get-tuple-element(%p), index=0
    %x = f32[] get-tuple-element(%p), index=1
    %lt.1 = pred[] compare(%x, %constant.2), direction=LT
    %lt.2 = pred[] compare(%i, %constant.1), direction=LT
    ROOT %and = pred[] and(%lt.1, %lt.2)
  }""",
}


@pytest.mark.parametrize('condition', _CONDITIONS.values(), ids=_CONDITIONS)
def test_a_loop_that_counts_to_a_constant_has_that_many_iterations(condition):
  text = textwrap.dedent(condition) + _PROGRAM
  assert _cycles(text) == 10000 + 6 * (100 + 6 * 10) + 5 * 1000 + 1
  # What the text says comes first.
  assert _cycles(text, trips={'path': 2}) == _cycles(text)


@pytest.mark.parametrize('compared', ['(%i, %j), direction=LT', '(%constant.1, %i), direction=LT',
                                      '(%i, %constant.1), direction=GT'])  # fmt: skip
def test_another_condition_says_nothing_about_iterations(compared):
  text = _CONDITIONS['plain'].replace('(%i, %constant.1), direction=LT', compared)
  assert text != _CONDITIONS['plain']
  assert _cycles(textwrap.dedent(text) + _PROGRAM) == _cycles()


def test_a_loop_may_count_in_steps():
  # XLA writes loops that send one part of a product while they compute another in this form, two turns at a time.
  body = """
  %body.2 (p: (f32[8], u32[])) -> (f32[8], u32[]) {
    %i = u32[]{:T(128)} get-tuple-element(%p), index=1
    %constant.1 = u32[]{:T(128)} constant(1)
    %j = u32[]{:T(128)} add(%i, %constant.1)
    %k = u32[]{:T(128)} add(%constant.1, %j)
    OP
    ROOT %t = (f32[8], u32[]) tuple(%a, %k)
  }""".replace('OP', _op('a', 10))
  condition = _CONDITIONS['fused'].replace('s32', 'u32').replace('index=0', 'index=1')
  loop = '%w = (f32[8], u32[]) while(%p), condition=%c, body=%body.2, metadata={op_name="jit(f)/while"}'
  text = textwrap.dedent(condition + '\n' + body) + '\n' + _entry(loop)
  assert _cycles(text) == 3 * 10
  assert _cycles(text.replace('add(%constant.1, %j)', 'add(%j, %j)')) == 6 * 10  # nothing is known of the step


def test_copies_from_memory_run_beside_the_work_and_one_after_another():
  start = '%copy-start.{0} = (f32[1024]{{0:T(128)S(1)}}, f32[1024]{{0:T(128)}}, u32[]{{:S(2)}}) copy-start(%p)'
  done = '%copy-done.{0} = f32[1024]{{0:T(128)S(1)}} copy-done(%copy-start.{0})'
  lines = [start.format(1), start.format(2), _op('a', 3), done.format(1), _op('b', 2), done.format(2)]
  # Each copy takes 4 ms. The first ends 1 ms after `a`, the second 2 ms after `b`.
  cost = Program(_entry(*lines), _CHIP).total()
  assert cost == Cost(seconds=pytest.approx(8e-3), cycles=5, launches=2, memory_bytes=8192)
  # With enough work in between none is waited for.
  lines[2] = _op('a', 8)
  assert Program(_entry(*lines), _CHIP).total().seconds == pytest.approx(10e-3)


_COPY = '%copy-start = (f32[256]{0:S(1)}, f32[256]{0:S(1)}, u32[]{:S(2)}) copy-start(%p)'
_SLICE = (
  '%slice-start.4 = ((bf16[1600,768]{1,0:T(8,128)(2,1)}), bf16[400,768]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)})'
  ' slice-start(%p), slice={[0:400], [0:768]}'
)
_SUM_OF_SEVERAL = '%r = (f32[128]{0}, f32[]{:T(128)}, f32[384]{0}) all-reduce(%p, %q, %o), to_apply=%x'


@pytest.mark.parametrize(
  ('line', 'field', 'num_bytes'),
  [
    (_COPY, 'memory_bytes', 0),  # stays on the chip
    (_COPY.replace(':S(1)', ''), 'memory_bytes', 2 * 1024),
    (_SLICE, 'memory_bytes', 2 * 400 * 768),  # its own size
    (_SUM_OF_SEVERAL, 'collective_bytes', 4 * (128 + 1 + 384)),
  ],
)
def test_bytes_that_an_operation_moves(line, field, num_bytes):
  assert getattr(Program(_entry(line), _CHIP).total(), field) == num_bytes


def test_transfers_between_devices():
  lines = '%r = f32[256]{0} all-reduce(%p), to_apply=%x', '%g = f32[256]{0} all-gather(%p), dimensions={0}'
  cost = Program(_entry(*lines), _CHIP, collective_seconds=1e-3).total()
  assert cost.collectives == {'all-gather': 1, 'all-reduce': 1}
  assert cost.collective_bytes == 2048
  # A millisecond each, and 1024 bytes once, or twice for the sum.
  assert cost.seconds == pytest.approx((1 + 4 + 1 + 2) * 1e-3)


def test_transfers_in_fusions_run_beside_the_work():
  def fused(name, shape, mark):
    return '\n'.join(
      [
        f'%{name} (p: f32[128]) -> f32[256] {{', '%p = f32[128]{0} parameter(0)',
        f'%g.{name} = f32[256]{{0}} all-gather(%p), channel_id=7, dimensions={{0}}',
        f'ROOT %c.{name} = {shape} custom-call(%g.{name}), custom_call_target="AsyncCollective{mark}"', '}',
      ]
    )  # fmt: skip

  begun = '(f32[128]{0}, f32[256]{0}, s32[2]{0:S(4)})'
  start = f'%async-collective-start.3 = {begun} fusion(%p), kind=kCustom, calls=%begin'
  done = '%async-collective-done.3 = f32[256]{0} fusion(%x, %y), kind=kCustom, calls=%end'
  lines = [start, _op('a', 2), done, _op('b', 1)]
  computations = fused('begin', begun, 'Start') + '\n' + fused('end', 'f32[256]{0}', 'Done') + '\n'
  cost = Program(computations + _entry(*lines), _CHIP, collective_seconds=1e-3).total()
  assert cost == Cost(pytest.approx(4e-3), 3, 2, collectives={'all-gather': 1}, collective_bytes=1024)
  lines[1] = _op('a', 9)  # the transfer takes 3 ms
  cost = Program(computations + _entry(*lines), _CHIP, collective_seconds=1e-3).total()
  assert cost.seconds == pytest.approx(10e-3)


def test_transfers_that_are_started_early_run_beside_the_work():
  lines = (
    '%s = (f32[128]{0}, f32[256]{0}) all-gather-start(%p), dimensions={0}', _op('a', 2),
    '%d = f32[256]{0} all-gather-done(%s)',
  )  # fmt: skip
  assert Program(_entry(*lines), _CHIP, collective_seconds=1e-3).total().seconds == pytest.approx(3e-3)


def test_parts_add_up_and_take_in_what_they_call():
  text = '\n'.join(
    [
      '%inner (p: f32[8]) -> f32[8] {', _op('a', 7), _op('b', 5, scope='rounds/while/body/verify/draft'), '}',
      '%body (p: f32[8]) -> f32[8] {', _op('c', 1), _op('d', 20, scope='rounds/while/body/draft/mul'), _op('e', 30),
      '%w = f32[8] while(%e), condition=%c, body=%inner, metadata={op_name="jit(f)/rounds/while/body/verify/while"}',
      '}', _entry('%v = f32[8] while(%p), condition=%c, body=%body, metadata={op_name="jit(f)/rounds/while"}'),
    ]
  )  # fmt: skip
  program = Program(text, _CHIP)
  costs = program.cost(['draft', 'verify'], loop='rounds')
  assert {part: cost.cycles for part, cost in costs.items()} == {'': 1, 'draft': 50, 'verify': 12}
  assert program.total(loop='rounds').cycles == 63


_KERNEL = (
  '%kernel.1 = (f32[256]{0:T(128)}, f32[256]{0:T(128)S(1)}) custom-call(%p, %q), custom_call_target="tpu_custom_call"'
)


def test_a_kernel_takes_a_launch_and_its_work_or_the_time_of_its_bytes():
  lines = '%p = f32[1024]{0:T(128)} parameter(0)', '%q = f32[1024]{0:T(128)S(1)} parameter(1)', _KERNEL
  cost = Program(_entry(*lines), _CHIP, kernels={'kernel.1': 100}).total()
  launch = cost.cycles - 100
  assert 1000 < launch < 3000
  assert cost == Cost(seconds=pytest.approx(1e-3 * (launch + 100)), cycles=launch + 100, launches=1)
  # It reads p and writes its first result while it works; q and the second result are on the chip.
  large = [line.replace('[1024]', f'[{2**20}]') for line in lines]
  cost = Program(_entry(*large), _CHIP, kernels={'kernel.1': 100}).total()
  assert cost.seconds == pytest.approx(1e-3 * (4 * 2**20 + 1024) / 1024)


def test_a_gather_with_code_of_its_own_is_a_launch():
  """The compiler gives it no cycles; what it gives none to otherwise is no launch."""
  gather = '%g = f32[8]{0} fusion(%p, %i), kind=kCustom, calls=%fused_computation.1, metadata={op_name="a/gather"}'
  cost = Program(_entry(gather), _CHIP).total()
  assert cost.launches == 1
  assert cost.cycles == Program(_entry(_KERNEL), _CHIP, kernels={'kernel.1': 0}).total().cycles
  assert Program(_entry(gather.replace('kCustom', 'kLoop')), _CHIP).total() == Cost()


@pytest.mark.parametrize(
  ('read', 'message'),
  [
    (lambda: _cycles(_entry(_KERNEL)), 'nothing is known of the cycles of the kernel kernel.1'),
    (lambda: _cycles(_PROGRAM.replace('ENTRY ', '')), 'no computation marked ENTRY'),
    (lambda: Memory.of(types.SimpleNamespace(memory_analysis=lambda: None)), 'does not report how much memory'),
    (
      lambda: schedule_cycles(_BUNDLES.replace('(%p5_p0), %s3_s4, 8', '(%p5_p0), %s3_s4, %s5_s6'), _CHAINS),
      '1 of the 2 loops have no constant limit',
    ),
  ],
)
def test_what_cannot_be_counted_is_refused(read, message):
  with pytest.raises(ValueError, match=message):
    read()


# As the compiler writes schedules, shortened: a loop of 8 turns around one of 3. The test of the outer loop stands in
# the inner one, empty bundles have no marks, and texts of an instruction may go over several lines.
_BUNDLES = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1   :  { %2 = dma.hbm_to_vmem [thread:$0]
base_bounds: (6, 32) }
   0x2 LB: > { %s3 = sphi 0 }
   0x3   :  {}
   0x4 LB: >> { %s4 = sphi 0 }
   0x5   : >> { %p5_p0 = scmp.ge.s32.totalorder %s4_s2, 3 /* loop exit test */ }
   0x6   : >> { %p6_p1 = scmp.ge.s32.totalorder (%p5_p0), %s3_s4, 8 /* loop exit test */ }
   0x7   : > { %7 = sbr.rel (!%p5_p0) target = $region20 }
   0x8   : > { %v8 = vadd.f32 %v1, %v2  ;;  %9 = sbr.rel (%p9_p2) target = $region30 }
   0x9   :  { %10 = sbr.rel (!%p6_p1) target = $region10 }
   0xa   :  { %11 = vst %v8 }
"""
_CHAINS = """\
New basic block in region: region0 {members=2 hlo=kernel.1 parent=-1}
  Length to end: 1, %s1 = smov 0

New basic block in region: region10 {members=3 hlo=kernel.1 parent=0}
  Length to end: 2, %s3 = sphi 0
  Length to end: 1, %s3 = smov 0

New basic block in region: region20 {members=3 hlo=kernel.1 parent=10}
  Length to end: 90, %v1 = vld
  Length to end: 7, %v2 = vmul

New basic block in region: region30 {members=3 hlo=kernel.1 parent=10}
  Length to end: 1, %v3 = vld
"""


def test_a_schedule_takes_its_bundles_or_its_chains():
  # Outside: 3 bundles. The outer loop: 4 bundles, chains of 2 and 1. The inner one: 4 bundles, a chain of 90.
  assert schedule_cycles(_BUNDLES, _CHAINS) == 3 + 8 * (4 + 3 * 90)
  assert schedule_cycles(_BUNDLES, _CHAINS.replace(' 90,', ' 1,')) == 3 + 8 * (4 + 3 * 4)


# The steps of a grid of 5: turns of a loop of 7, behind a test of the turn. A branch within a step is no end of it.
_GRID = """\
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2_s1 = sphi 0 }
   0x2   : > { %p3_p7 = scmp.ge.s32.totalorder %s2_s1, 1 }
   0x3   : > { %p4_p8 = scmp.lt.s32.totalorder %s2_s1, 6 }
   0x4   : > { %p5_p9 = pnand %p3_p7, %p4_p8 } /* Start region 27 */
   0x5   : > { %6 = sbr.rel (%p5_p9) target = $region28 }
   0x6   : > { %v1 = vld }
   0x7   : > { %7 = sbr.rel (!%p9_p1) target = $region32 }
   0x8 LB: >> { %s3_s4 = sphi 0 }
   0x9   : >> { %p6_p0 = scmp.ge.s32.totalorder %s3_s4, 3 /* loop exit test */ }
   0xa   : >> { %7 = sbr.rel (!%p6_p0) target = $region40 }
   0xb PF: > { %v2 = vst } /* Start/End empty region 32 */
   0xc PF: > { %s5 = sand 1 } /* Start/End empty region 28 */
   0xd   : > { %p8_p1 = scmp.ge.s32.totalorder %s2_s1, 7 /* loop exit test */ }
   0xe   :  { %9 = sbr.rel (!%p8_p1) target = $region10 }
"""
_CHAINS_OF_GRID = """\
New basic block in region: region10 {members=3 hlo=kernel.1 parent=0}
  Length to end: 5, %s2 = sphi 0

New basic block in region: region27 {members=3 hlo=kernel.1 parent=10}
  Length to end: 40, %v1 = vld

New basic block in region: region30 {members=3 hlo=kernel.1 parent=27}
  Length to end: 10, %v2 = vst

New basic block in region: region40 {members=3 hlo=kernel.1 parent=30}
  Length to end: 90, %v1 = vld
"""


def test_the_steps_of_a_grid_count_as_often_as_there_are_steps():
  # Outside: a bundle. Each turn: 8 bundles. A step: chains of 40 and 10, and a loop of 3 turns of 90.
  assert schedule_cycles(_GRID, _CHAINS_OF_GRID) == 1 + 7 * 8 + 5 * (50 + 3 * 90)
  # A branch by anything but the turn is taken.
  always = _GRID.replace('%p4_p8 = scmp.lt.s32.totalorder %s2_s1', '%p4_p8 = scmp.lt.s32.totalorder %s8_s9')
  assert schedule_cycles(always, _CHAINS_OF_GRID) == 1 + 7 * (55 + 3 * 90)


# The schedules of a program, as files of the compiler.
_CALL = '  %{} = f32[8]{{0}} custom-call(%p), custom_call_target="tpu_custom_call"\n'
_WRITTEN_BUNDLES = '     0   :  { %s1 = smov 0 }\n   0x1   :  { %s2 = smov 0 }\n'
_WRITTEN_CHAINS = (
  'New basic block in region: region0 {{members=1 hlo=k parent=-1}}\n  Length to end: {}, %s1 = smov 0\n'
)


def _write_schedules(folder, **lengths):
  for name, length in lengths.items():
    name = name.replace('_', '.')
    (folder / f'17-{name}-00-critical-path.txt').write_text(_WRITTEN_CHAINS.format(length))
    (folder / f'17-{name}-01-final_bundles.txt').write_text(_WRITTEN_BUNDLES)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setattr(kernels, 'write_schedules', lambda: tmp_path)
  monkeypatch.setattr(kernels, '_slowest', Counter())
  return tmp_path


def test_equal_kernels_share_a_schedule(folder):
  text = ''.join(map(_CALL.format, ['forward.1', 'forward.2', 'forward.3.clone', 'backward']))
  _write_schedules(folder, forward_1=5, forward_2=9, forward_3_clone=4, backward=1)
  cycles = {'forward.1': 5, 'forward.2': 9, 'forward.3.clone': 4, 'backward': 2}
  assert kernels.take_schedules(text) == cycles
  assert not list(folder.iterdir())
  _write_schedules(folder, forward_2=7, forward_7=11)  # the last of no kernel of this program
  text = ''.join(map(_CALL.format, ['forward.2', 'forward.11', 'backward.5']))
  # A program that was compiled before had the others.
  assert kernels.take_schedules(text) == {'forward.2': 7, 'forward.11': 9, 'backward.5': 2}


def test_equal_kernels_have_the_same_results(folder):
  small, large = _CALL.format('forward.1'), _CALL.format('forward.2').replace('f32[8]', 'f32[64]')
  _write_schedules(folder, forward_1=5, forward_2=90)
  cycles = {'forward.1': 5, 'forward.2': 90, 'forward.3': 5}
  assert kernels.take_schedules(small + large + small.replace('.1', '.3')) == cycles
  with pytest.raises(ValueError, match=r'there is no schedule of the kernel forward\.4'):
    kernels.take_schedules(_CALL.format('forward.4').replace('f32[8]', 'f32[16]'))
  with pytest.raises(ValueError, match=r'there is no schedule of the kernel backward\.1'):
    kernels.take_schedules(small + _CALL.format('backward.1'))
