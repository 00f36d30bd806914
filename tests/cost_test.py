"""Memory, and costs of programs for TPU: a replay of texts whose costs are known."""

import textwrap

import pytest

from spectr_jax.aot.cost import Cost, Program
from spectr_jax.aot.hlo_report import Memory
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


def test_one_iteration_of_a_loop_alone():
  assert _cycles(trips={'search': 4}, loop='path') == 100 + 4 * 10
  assert _cycles(loop='elsewhere') == 0


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


@pytest.mark.parametrize(
  'condition',
  [
    '%lt = pred[] compare(%i, %j), direction=LT',
    '%lt = pred[] compare(%constant.1, %i), direction=LT',
    '%gt = pred[] compare(%i, %constant.1), direction=GT',
  ],
)
def test_another_condition_says_nothing_about_iterations(condition):
  lines = '%i = s32[] get-tuple-element(%p), index=0', '%constant.1 = s32[] constant(6)', condition
  text = '\n'.join(['%c (p: (s32[], f32[8])) -> pred[] {', *lines, '}']) + _PROGRAM
  assert _cycles(text) == _cycles()


def test_copies_from_memory_run_beside_the_work_and_one_after_another():
  start = '%copy-start.{0} = (f32[1024]{{0:T(128)S(1)}}, f32[1024]{{0:T(128)}}, u32[]{{:S(2)}}) copy-start(%p)'
  done = '%copy-done.{0} = f32[1024]{{0:T(128)S(1)}} copy-done(%copy-start.{0})'
  lines = [start.format(1), start.format(2), _op('a', 3), done.format(1), _op('b', 2), done.format(2)]
  # Each copy takes 4 ms. The first ends 1 ms after `a`, the second 2 ms after `b`.
  found = Program(_entry(*lines), _CHIP).total()
  assert found == Cost(seconds=pytest.approx(8e-3), cycles=5, launches=2, memory_bytes=8192)
  # With enough work in between none is waited for.
  lines[2] = _op('a', 8)
  assert Program(_entry(*lines), _CHIP).total().seconds == pytest.approx(10e-3)


def test_what_stays_on_the_chip_is_no_copy_from_memory():
  line = '%copy-start = (f32[256]{0:S(1)}, f32[256]{0:S(1)}, u32[]{:S(2)}) copy-start(%p)'
  assert Program(_entry(line), _CHIP).total().memory_bytes == 0
  assert Program(_entry(line.replace(':S(1)', '')), _CHIP).total().memory_bytes == 2 * 1024


def test_slices_of_arrays_count_with_their_own_size():
  line = (
    '%slice-start.4 = ((bf16[1600,768]{1,0:T(8,128)(2,1)}), bf16[400,768]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)})'
    ' slice-start(%p), slice={[0:400], [0:768]}'
  )
  assert Program(_entry(line), _CHIP).total().memory_bytes == 2 * 400 * 768


def test_transfers_between_devices():
  lines = '%r = f32[256]{0} all-reduce(%p), to_apply=%x', '%g = f32[256]{0} all-gather(%p), dimensions={0}'
  found = Program(_entry(*lines), _CHIP, collective_seconds=1e-3).total()
  assert found.collectives == {'all-gather': 1, 'all-reduce': 1}
  assert found.collective_bytes == 2048
  # A millisecond each, and 1024 bytes once, or twice for the sum.
  assert found.seconds == pytest.approx((1 + 4 + 1 + 2) * 1e-3)


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
  found = program.cost(['draft', 'verify'], loop='rounds')
  assert {part: cost.cycles for part, cost in found.items()} == {'': 1, 'draft': 50, 'verify': 12}
  assert program.total(loop='rounds').cycles == 63


@pytest.mark.parametrize('loop', [None, 'path'])
def test_a_text_without_a_main_computation_is_refused(loop):
  with pytest.raises(ValueError, match='no computation marked ENTRY'):
    _cycles(_PROGRAM.replace('ENTRY ', ''), loop=loop)


def test_a_program_without_memory_analysis_is_refused():
  class Unanalysed:
    def memory_analysis(self):
      return None

  with pytest.raises(ValueError, match='does not report how much memory'):
    Memory.of(Unanalysed())
