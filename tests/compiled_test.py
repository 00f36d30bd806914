"""Figures that are read from the text of a compiled program."""

import textwrap

import pytest

from spectr_jax.aot.hlo_report import Memory, count_collectives, estimate_cycles

# As XLA writes programs for TPU, shortened.
_PROGRAM = textwrap.dedent("""
  HloModule jit_f

  %inner.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
    %a = f32[8]{0} fusion(%p), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"10"}
  }

  %body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
    %b = f32[8]{0} fusion(%p), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"100"}
    %w = (s32[], f32[8]) while(%b), condition=%c, body=%inner.1, metadata={op_name="jit(f)/vmap(path)/while/body/search/while"}
  }

  %known (p: (s32[], f32[8])) -> (s32[], f32[8]) {
    %k = f32[8]{0} fusion(%p), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"1000"}
  }

  %cheap (p: f32[8]) -> f32[8] {
    %l = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"1"}
  }

  ENTRY %main.9_spmd (p: f32[8]) -> f32[8] {
    %g = f32[16]{0} all-gather(%p), dimensions={0}
    %h = (f32[8], f32[16]) all-gather-start(%p), dimensions={0}
    %r = f32[8]{0} all-reduce(%p), to_apply=%x
    %m = f32[8]{0} fusion(%p), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"10000"}
    %v = (s32[], f32[8]) while(%m), condition=%c, body=%body.1, metadata={op_name="jit(f)/vmap(path)/while"}
    %n = (s32[], f32[8]) while(%v), condition=%c, body=%known, metadata={op_name="jit(f)/while"}, backend_config={"known_trip_count":{"n":"5"}}
    %o = f32[8]{0} conditional(%n, %p, %p), branch_computations={%known, %cheap}
  }
""")  # noqa: E501


def test_loops_count_once_per_iteration():
  assert estimate_cycles(_PROGRAM) == 10000 + (100 + 10) + 5 * 1000 + 1
  assert estimate_cycles(_PROGRAM, {'path': 3}) == 10000 + 3 * (100 + 10) + 5 * 1000 + 1
  # A scope applies to the loop directly within it, not to loops inside of that one.
  assert estimate_cycles(_PROGRAM, {'path': 3, 'search': 4}) == 10000 + 3 * (100 + 4 * 10) + 5 * 1000 + 1


def test_one_iteration_of_a_loop_alone():
  assert estimate_cycles(_PROGRAM, {'search': 4}, loop='path') == 100 + 4 * 10
  assert estimate_cycles(_PROGRAM, loop='elsewhere') == 0


@pytest.mark.parametrize('loop', [None, 'path'])
def test_a_text_without_a_main_computation_is_refused(loop):
  with pytest.raises(ValueError, match='no computation marked ENTRY'):
    estimate_cycles(_PROGRAM.replace('ENTRY ', ''), loop=loop)


def test_collectives_are_counted_by_kind():
  assert count_collectives(_PROGRAM) == {'all-gather': 2, 'all-reduce': 1}


def test_a_program_without_memory_analysis_is_refused():
  class Unanalysed:
    def memory_analysis(self):
      return None

  with pytest.raises(ValueError, match='does not report how much memory'):
    Memory.of(Unanalysed())
