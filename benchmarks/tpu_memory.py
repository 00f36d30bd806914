"""Memory of the decoding loop on one TPU chip, from an ahead-of-time compilation: no TPU and no weights are needed.

Command   python -m benchmarks.tpu_memory --num_drafts=8 --draft_length=8
Needs     the extra `tpu`, for the compiler
Models    of SpecTr's experiment: a target of 95M and a draft of 6M parameters, vocabulary 32000
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
from absl import flags

from spectr_jax.draft import ModelDrafter
from spectr_jax.generate import _run_rounds, init_decode
from spectr_jax.io import command_line
from spectr_jax.methods import Method, get_method
from spectr_jax.model import Model
from spectr_jax.models.transformer import TransformerConfig, init_params, transformer_model
from spectr_jax.topology import chip_of, describe_topology
from spectr_jax.tree import TokenTree

TARGET = TransformerConfig(32000, embed_dim=768, num_layers=10, num_heads=12, mlp_dim=3072, max_length=1024)
DRAFT = TransformerConfig(32000, embed_dim=144, num_layers=6, num_heads=4, mlp_dim=576, max_length=1024)


@dataclasses.dataclass(frozen=True)
class Report:
  """What the compiler says about a program, in bytes unless named otherwise.

  Attributes:
    arguments: Weights, caches, tokens and keys that go in.
    outputs: The state that comes out.
    aliased: The part of the outputs that reuses donated arguments.
    temporaries: Scratch memory at its peak.
    code: The program itself.
    flops: Floating-point operations, loop bodies counted once: about one round.
    compile_seconds: Time to lower and compile.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  flops: float
  compile_seconds: float

  @property
  def total(self) -> int:
    """Device memory the program needs."""
    return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def abstract_model(config: TransformerConfig) -> Model:
  """A transformer whose parameters are shapes."""
  return jax.eval_shape(lambda key: transformer_model(init_params(key, config), config), jax.random.key(0))


def compile_rounds(
  device: jax.Device,
  method: str | Method,
  tree: TokenTree,
  *,
  target: TransformerConfig = TARGET,
  draft: TransformerConfig | None = DRAFT,
  batch_size: int = 8,
  max_length: int = 256,
  dtype: str = 'bfloat16',
) -> tuple[jax.stages.Compiled, Report]:
  """Compiles the loop of `spectr_jax.decode_rounds` for `device`.

  Args:
    device: A device, or the description of one.
    method: A method or its name.
    tree: The tree of guesses.
    target: Sizes of the target.
    draft: Sizes of the draft; ignored by methods that draft nothing.
    batch_size: Rows.
    max_length: Prompt and new tokens, half of it each.
    dtype: Type of activations, weights and caches.

  Returns:
    The program and what the compiler says about it.

  Raises:
    ValueError: The method does not take the tree.
  """
  method = get_method(method)
  tree = method.tree_for(tree)
  target_model, drafter = abstract_model(dataclasses.replace(target, dtype=dtype)), None
  if method.max_drafts != 0:
    drafter = ModelDrafter(abstract_model(dataclasses.replace(draft, dtype=dtype)))
  prompt_size = max_length // 2
  state = jax.eval_shape(
    functools.partial(init_decode, method=method, tree=tree, max_new_tokens=max_length - prompt_size, eos_id=2),
    jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl='threefry2x32'), batch_size)),
    target_model,
    drafter,
    jax.ShapeDtypeStruct((batch_size, prompt_size), jnp.int32),
    jax.ShapeDtypeStruct((batch_size,), jnp.int32),
  )
  carry = dataclasses.replace(state, target=None, drafter=None)
  sharding = jax.sharding.SingleDeviceSharding(device)
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    (target_model, drafter, carry, jax.ShapeDtypeStruct((), jnp.int32)),
  )
  start = time.perf_counter()
  compiled = _run_rounds.lower(*arguments).compile()
  seconds = time.perf_counter() - start
  memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
  report = Report(
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    code=memory.generated_code_size_in_bytes,
    flops=costs.get('flops', float('nan')),
    compile_seconds=seconds,
  )
  return compiled, report


def describe(report: Report, capacity: int) -> str:
  """The report as lines of text, for a chip with so many bytes of memory."""
  sizes = ('arguments', 'outputs', 'aliased', 'temporaries', 'code', 'total')
  lines = [f'{name:<12} {getattr(report, name) / 2**20:10.1f} MiB' for name in sizes]
  lines += [
    f'{"free":<12} {(capacity - report.total) / 2**20:10.1f} MiB of {capacity / 2**30:.0f} GiB',
    f'{"FLOPs":<12} {report.flops / 1e9:10.2f} G, each loop body counted once: a lower bound of one round',
    f'{"compile":<12} {report.compile_seconds:10.1f} s',
  ]
  return '\n'.join(lines)


if __name__ == '__main__':
  _METHOD = flags.DEFINE_string('method', 'spectr', 'Method.')
  _NUM_DRAFTS = flags.DEFINE_integer('num_drafts', 8, 'K, drafts per row.', lower_bound=1)
  _DRAFT_LENGTH = flags.DEFINE_integer('draft_length', 8, 'L, tokens per draft.', lower_bound=1)
  _BATCH_SIZE = flags.DEFINE_integer('batch_size', 8, 'Rows.', lower_bound=1)
  _MAX_LENGTH = flags.DEFINE_integer('max_length', 256, 'Prompt and new tokens, half of it each.', lower_bound=2)
  _DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'Type of weights, caches and activations.')
  _TOPOLOGY = flags.DEFINE_string('topology', 'v5e:2x2', 'Slice that the chip is one of.')
  _HLO = flags.DEFINE_string('hlo', None, 'Write the optimised program to this file.')

  def main(argv):
    del argv
    jax.config.update('jax_platforms', 'cpu')  # constants need a device; a TPU that is there stays free
    method = get_method(_METHOD.value)
    tree = TokenTree() if method.max_drafts == 0 else TokenTree.chains(_NUM_DRAFTS.value, _DRAFT_LENGTH.value)
    chip = describe_topology(_TOPOLOGY.value)[0]
    compiled, report = compile_rounds(
      chip,
      method,
      tree,
      batch_size=_BATCH_SIZE.value,
      max_length=_MAX_LENGTH.value,
      dtype=_DTYPE.value,
    )
    print(f'{method.name}, {tree.num_nodes} guesses, batch {_BATCH_SIZE.value}, {_TOPOLOGY.value}')
    print(describe(report, chip_of(chip).memory))
    if _HLO.value:
      with open(_HLO.value, 'w') as stream:
        stream.write(compiled.as_text())

  command_line.run(main)
