"""Compiles the train step ahead of time for a TPU slice, without a TPU, and reports whether it fits and what it costs.

Command   python -m train.aot --config=configs/lm1b.py:97m --topology=v5e:4x4 --mesh=data:8,model:2
Needs     the extra `tpu`, for the compiler

Bytes are the compiler's figures for one device. The compiler counts the operations of a loop's body once. So FLOPs,
which are compared with a closed form, come from a second compilation without loops. Times are estimates, and no TPU is
involved: the schedule of the program that trains is replayed with the cycles that the compiler expects for every
operation, as often as its loop turns, copies from memory at its bandwidth, and transfers between devices, each of which
takes `--collective_us` and the time of its bytes.
"""

from __future__ import annotations

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from common.output_files import OutputFiles
from spectr_jax.aot.cost import COLLECTIVE_SECONDS
from spectr_jax.aot.hlo_report import ProgramReport, measure
from spectr_jax.aot.kernels import take_schedules
from spectr_jax.aot.tpu_slices import describe_topology
from spectr_jax.io.hub.hub_model import read_hub_config
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.models.param_shapes import param_shapes
from spectr_jax.sharding import shardings
from train import config_flag, plan
from train.run import make_config_mesh
from train.step import Learner, Teacher, batch_sharding, init_state, make_optimizer, make_train_step, out_of_memory
from train.train import check_config, check_teacher


@dataclasses.dataclass(frozen=True)
class Report(ProgramReport):
  """The compiler's figures for a train step. Its inputs are the state, the batch and, for distillation, the teacher."""

  flops: float  # of a step, per device; those of kernels by the closed form
  closed_form_flops: float  # of the matrix products per device, those of a teacher's forward pass among them
  tokens: int  # of a step, on all devices

  @property
  def utilisation(self) -> float:
    """Model FLOP utilisation at the estimated time."""
    return self.closed_form_flops / self.cost.seconds / self.chip.peak_flops


def _placed(mesh: Mesh, shapes):
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings(mesh, shapes)
  )  # fmt: skip


def _teacher(config, mesh: Mesh) -> Teacher | None:
  """The shapes of the teacher that the configuration names, sharded as `train.main` would shard it; a `ValueError` if
  there is no such model, or its sizes do not fit.
  """
  if not config.distill_from:
    return None
  sizes = read_hub_config(config.distill_from)
  check_teacher(config, sizes)
  sizes = dataclasses.replace(sizes, dtype=config.distill_dtype or sizes.dtype)
  return Teacher(_placed(mesh, param_shapes(sizes)), sizes, config.distill_weight)


def compile_step(config, mesh: Mesh, *, unroll: bool = False) -> tuple[jax.stages.Compiled, float]:
  """The compiled train step of a configuration, and the seconds that compilation took. The mesh may describe absent
  devices. `unroll` writes loops out, for counts of operations. A `ValueError` if the configuration is invalid, or the
  devices have too little memory.
  """
  model_config, optimizer = check_config(config), make_optimizer(config)
  step = make_train_step(optimizer, Learner(model_config, 1, mesh, config.remat, config.dropout), unroll=unroll)
  state = jax.eval_shape(lambda: init_state(0, optimizer, model_config))
  state = _placed(mesh, state)
  rows = jax.ShapeDtypeStruct(
    (config.num_microbatches, config.batch_size // config.num_microbatches, config.seq_len + 1),
    jnp.int32,
    sharding=batch_sharding(mesh),
  )
  start = time.perf_counter()
  with tracing_for(mesh):
    lowered = step.lower(state, rows, _teacher(config, mesh))
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    raise out_of_memory(error) or error from error
  return compiled, time.perf_counter() - start


def analyse(config, mesh: Mesh, *, collective_seconds: float = COLLECTIVE_SECONDS) -> Report:
  """Compiles the step with and without loops and collects the compiler's figures; `collective_seconds` is the time of a
  transfer between devices beside that of its bytes.
  """
  compiled, seconds = compile_step(config, mesh)
  measured = measure(compiled, mesh, seconds, collective_seconds=collective_seconds)
  unrolled = compile_step(config, mesh, unroll=True)[0]
  take_schedules(unrolled.as_text())  # removes them, for the next program of this process
  model_config = check_config(config)
  sizes = config.batch_size, config.seq_len
  flops = plan.train_flops(model_config, *sizes, remat=config.remat)
  of_attention = (4 if config.remat else 3) * plan.attention_flops(model_config, *sizes)
  if config.distill_from:
    teacher_config = read_hub_config(config.distill_from)
    flops += plan.forward_flops(teacher_config, *sizes)
    of_attention += plan.attention_flops(teacher_config, *sizes)
  # The compiler counts no operations of kernels, which are those of attention.
  has_kernels = 'tpu_custom_call' in compiled.as_text()
  return Report(
    **vars(measured),
    flops=unrolled.cost_analysis()['flops'] + (of_attention / mesh.size if has_kernels else 0),
    closed_form_flops=flops / mesh.size,
    tokens=config.batch_size * config.seq_len,
  )


def describe(report: Report) -> str:
  """The report as lines of text."""
  seconds = report.cost.seconds
  return report.table(
    f'{"FLOPs":<12} {report.flops:12.4g} per device and step, {report.flops / report.closed_form_flops:.3f} of the'
    ' closed form',
    f'{"estimate":<12} {1e3 * seconds:12.1f} ms per step, {report.tokens / seconds:,.0f} tokens/s,'
    f" {report.utilisation:.0%} of the peak: by a replay of the compiler's schedule",
  )


if __name__ == '__main__':
  _CONFIG = config_flags.DEFINE_config_file('config', None, 'Experiment, a file of configs/.', lock_config=True)
  _TOPOLOGY = flags.DEFINE_string('topology', 'v5e:4x4', 'Slice to compile for.')
  _MESH = flags.DEFINE_string('mesh', None, "Sizes of the mesh, such as data:8,model:2; default: the config's.")
  _COLLECTIVE = flags.DEFINE_float(
    'collective_us', 1e6 * COLLECTIVE_SECONDS, 'Microseconds of a transfer between devices beside that of its bytes.',
    lower_bound=0,
  )  # fmt: skip
  _OUTPUT = flags.DEFINE_string('output', None, 'Write the report to this file, as JSON.')

  def main():
    jax.config.update('jax_platforms', 'cpu')  # constants need a device; an attached TPU stays free
    config = _CONFIG.value
    if _MESH.value:
      with config.unlocked():
        config.mesh = _MESH.value
    model_config, devices = check_config(config), describe_topology(_TOPOLOGY.value)
    mesh = make_config_mesh(config, devices)
    print(f'{_TOPOLOGY.value}\n{plan.describe(config, model_config, mesh)}\n', flush=True)
    with OutputFiles(output=_OUTPUT.value) as files:
      report = analyse(config, mesh, collective_seconds=1e-6 * _COLLECTIVE.value)
      content = {'topology': _TOPOLOGY.value, 'mesh': config.mesh, **report.as_dict()}
      files.write_after(lambda: print(describe(report)), output=json.dumps(content, indent=2) + '\n')
    report.memory.check(report.chip)

  flags.mark_flag_as_required('config')
  config_flag.run(
    main,
    [
      '--config=configs/lm1b.py:97m --topology=v5e:4x4 --mesh=data:16',
      '--config=configs/lm1b.py:97m --topology=v5e:4x4 --mesh=data:8,model:2',
    ],
  )
