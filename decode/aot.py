"""Compiles the decoding loop for a TPU slice, without a TPU, and reports whether it fits and what it costs.

Command   python -m decode.aot --target_config=configs/lm1b.py:97m --draft_config=configs/lm1b.py:6m \
            --method=race_block --num_drafts=8 --draft_length=8 --batch_size=64 --topology=v5e:4x4 --mesh=data:8,model:2
          python -m decode.aot --target_config=configs/hub/llama_3_8b --draft_config=configs/hub/draft_of_llama_3 ...
Needs     the extra `tpu`, for the compiler

No weights are read: sizes come from a file of configs/ or from the `config.json` of a public model. With
`--draft_config=configs/head.py:dspark` or `:eagle3` a head of a public target's sizes drafts. Bytes are the compiler's
figures for one device. Times are estimates, and no TPU is involved: the program's schedule is replayed with
the cycles that the compiler expects for every operation, copies from memory at its bandwidth, and transfers between
devices, each of which takes `--collective_us` and the time of its bytes. A loop that can end early counts with its
largest number of iterations: along a path the depth of the tree, over candidates or nodes their number. Filters count
where `--filters` asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Collection
from typing import Any, TypeAlias

import jax
from absl import flags

from common import command_line, config_file
from common.output_files import OutputFiles
from decode.experiment.model_options import DRAFT_MESHES
from spectr_jax import METHODS, Decoder, DecodeSharding, Drafter, Model, TokenTree
from spectr_jax.aot.compile import compile_decode
from spectr_jax.aot.cost import COLLECTIVE_SECONDS, Cost
from spectr_jax.aot.hlo_report import ProgramReport, measure
from spectr_jax.aot.tpu_slices import describe_topology
from spectr_jax.draft import head_drafter, one_pass_drafter
from spectr_jax.engine.loop import PARTS, ROUNDS
from spectr_jax.io.heads.head_sizes import EAGLE3_FIELDS, ONE_PASS_FIELDS, check_fields, head_config, one_pass_config
from spectr_jax.io.hub.hub_model import read_hub_config
from spectr_jax.io.model_files import files_of, hub_folder
from spectr_jax.kernels.filters import FILTERS, FILTERS_BY_NAME
from spectr_jax.kernels.thresholds import THRESHOLD_PASSES, THRESHOLDS
from spectr_jax.methods import Method, get_method
from spectr_jax.models import head, one_pass
from spectr_jax.models.causal_lm import causal_lm, config_of
from spectr_jax.models.causal_lm_config import CausalLMConfig, lm1b_config
from spectr_jax.models.head import HeadConfig
from spectr_jax.models.one_pass_config import OnePassConfig
from spectr_jax.models.param_shapes import param_shapes
from spectr_jax.sharding import make_mesh

DraftConfig: TypeAlias = CausalLMConfig | HeadConfig | OnePassConfig
# The kinds of heads that are compiled, of `configs/head.py`.
_HEAD_FIELDS = {'eagle3': EAGLE3_FIELDS, 'dspark': ONE_PASS_FIELDS, 'dflash': ONE_PASS_FIELDS}


@dataclasses.dataclass(frozen=True)
class Report(ProgramReport):
  """The compiler's figures for the loop, with the `parts` of one round. Inputs are weights, caches, keys and tokens."""

  batch_size: int  # rows on all devices
  target_flops: float  # per device, of the matrix products of a round's target call, by the closed form
  autoregressive: Cost  # of a step with the same target, rows and mesh

  def speedup(self, block_efficiency: float) -> float:
    return block_efficiency * self.autoregressive.seconds / self.cost.seconds

  def as_dict(self) -> dict[str, Any]:
    return super().as_dict() | {'autoregressive_cycles': self.autoregressive.cycles}


def abstract_model(config: CausalLMConfig) -> Model:
  """A model whose parameters are shapes without values."""
  return jax.eval_shape(functools.partial(causal_lm, config=config), param_shapes(config))


def abstract_head(config: HeadConfig | OnePassConfig, vocab_size: int) -> Drafter:
  """A head whose parameters are shapes without values, on a target of `vocab_size` tokens."""
  if isinstance(config, OnePassConfig):
    return jax.eval_shape(lambda params: one_pass_drafter(params, config, vocab_size), one_pass.param_shapes(config))
  return jax.eval_shape(lambda params: head_drafter(params, config, vocab_size), head.param_shapes(config))


def abstract_pair(
  target: CausalLMConfig, draft: DraftConfig | None, sharding: DecodeSharding
) -> tuple[Model, Model | Drafter | None]:
  """A target and its draft without values, with as many copies of key-value heads as the sharding needs.

  A draft's vocabulary is padded or cut to the target's. A `ValueError` says that heads cannot be sharded.
  """

  def make(config, is_divided):
    return abstract_model(config.for_mesh(sharding.mesh) if is_divided else config)

  model = make(target, True)
  if draft is None:
    return model, None
  if isinstance(draft, (HeadConfig, OnePassConfig)):
    return model, abstract_head(draft, model.vocab_size)
  return model, make(draft, sharding.is_draft_divided).with_vocab_size(model.vocab_size)


def _num_params(config: DraftConfig, vocab_size: int) -> int:
  if isinstance(config, (HeadConfig, OnePassConfig)):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_head(config, vocab_size).params))
  return config.num_params


def matmul_flops(model: Model, num_tokens: int) -> float:
  """Floating-point operations of the matrix products with a model's parameters, each token with all of them, or with
  those of its experts.
  """
  # The output head is the embedding or has its size.
  kernels = [
    leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    if path[-1].key in ('kernel', 'embedding')
  ]
  experts = config_of(model).experts
  used = (math.prod(shape) if len(shape) == 2 else experts.num_chosen * math.prod(shape[1:]) for shape in kernels)
  return 2.0 * num_tokens * sum(used)


def analyse(
  sharding: DecodeSharding,
  method: str | Method,
  tree: TokenTree,
  *,
  target: CausalLMConfig,
  draft: DraftConfig | None,
  batch_size: int,
  prompt_length: int,
  max_new_tokens: int,
  collective_seconds: float = COLLECTIVE_SECONDS,
  filters: Collection[str] = (),
) -> Report:
  """Compiles the loop of a method and that of autoregressive decoding, on a mesh whose devices may be absent ones.

  Prompt and new tokens determine the size of a cache; methods without a draft ignore it. `filters`, of `top_k`,
  `top_p` and `min_p`, are counted. A `ValueError` says what cannot be sharded, does not fit into a context or the
  memory, or that the method does not take the tree.
  """
  cache_size = prompt_length + max_new_tokens
  model, small = abstract_pair(target, draft, sharding)
  models = [each for each in (model, small) if isinstance(each, Model)]
  limits = [each.context_length for each in models if each.context_length is not None]
  if cache_size > min(limits, default=cache_size):
    raise ValueError(
      f"prompts of {prompt_length} tokens with {max_new_tokens} new ones exceed the models' limit of {min(limits)}"
    )

  def measure_rounds(method, tree):
    decoder = Decoder.make(
      model, small, method=method, tree=tree, max_new_tokens=max_new_tokens, cache_size=cache_size, eos_id=0,
      sharding=sharding,
    )  # fmt: skip
    start = time.perf_counter()
    compiled = compile_decode(decoder, batch_size=batch_size, prompt_length=prompt_length, filters=filters)
    return measure(
      compiled, sharding.mesh, time.perf_counter() - start, PARTS, loop=ROUNDS, trips=_trips(decoder.tree),
      dearest=(FILTERS,) if filters else (), collective_seconds=collective_seconds,
    )  # fmt: skip

  measured = measure_rounds(method, tree)
  tree = get_method(method).tree_for(tree)
  # Without nodes it is the step of autoregressive decoding.
  step = measure_rounds('autoregressive', None) if tree.num_nodes else measured
  return Report(
    **vars(measured),
    batch_size=batch_size,
    target_flops=matmul_flops(model, batch_size * (tree.num_nodes + 1)) / sharding.mesh.size,
    autoregressive=step.cost,
  )


def _trips(tree: TokenTree) -> dict[str, int]:
  """The number of iterations of each loop of a round, by scope: the largest one, but for loops over groups."""
  num_candidates = int(tree.num_children[0]) if tree.num_nodes else 0
  return {
    'depths': tree.max_depth - 1,
    'path': tree.max_depth + 1,
    'visits': tree.num_nodes,
    'candidates': num_candidates,
    'search': 16,
    THRESHOLDS: THRESHOLD_PASSES,
    # Positions with several candidates are worked on in groups of eight. One group is enough for most guesses.
    'races': 1,
    'excess': 1,
    'gammas': 1,
  }


def describe(report: Report, block_efficiencies: tuple[float, ...]) -> str:
  """The report as lines of text, with the speed-up for numbers of tokens per target call."""
  speedups = ', '.join(f'{report.speedup(value):.2f}x at {value:g}' for value in block_efficiencies)
  return report.table(
    f'{"target call":<12} {report.target_flops:12.4g} FLOPs per device and round, attention to the cache left out',
    f'{"round":<12} {1e3 * report.cost.seconds:12.3f} ms, an autoregressive step'
    f' {1e3 * report.autoregressive.seconds:.3f} ms with {sum(report.autoregressive.collectives.values())} transfers:'
    " by a replay of the compiler's schedule",
    after=[f'{"speed-up":<12} {speedups} tokens per target call'],
  )


def read_config(path: str, dtype: str) -> CausalLMConfig:
  """The sizes that an option names: `FILE.py[:ARGUMENT]`, a folder with `config.json`, or `ORG/NAME` on the hub."""
  if path.partition(':')[0].endswith('.py'):
    config = config_file.load(path)
    if 'model' not in config:
      raise ValueError(f'{path} does not hold the sizes of a model')
    # Files of training say how long its rows are, and not how long texts may be.
    return lm1b_config(config.vocab_size, context_length=2**20, **{**config.model, 'dtype': dtype})
  return read_hub_config(hub_folder(path, files=('config.json',)), dtype=dtype)


def read_draft(path: str, target: CausalLMConfig, dtype: str) -> DraftConfig:
  """The sizes of a draft: as of `read_config`, or of a head for the target by the kinds of `configs/head.py`."""
  experiment = config_file.load(path) if path.partition(':')[0].endswith('.py') else {}
  if 'kind' not in experiment:
    return read_config(path, dtype)
  fields = _HEAD_FIELDS.get(experiment.kind)
  if fields is None:
    raise ValueError(f'draft_config: {path} is not compiled here; of heads {", ".join(_HEAD_FIELDS)} are')
  check_fields(experiment, fields)
  vocab_size = min(experiment.get('vocab_size', target.vocab_size), target.vocab_size)
  experiment.update(vocab_size=vocab_size, dtype=dtype, has_unembedding=False)
  if experiment.kind == 'eagle3':
    config = head_config(experiment, target)
  else:
    config = one_pass_config(experiment, target, max(experiment.mask_id, 0))
  return dataclasses.replace(config, is_reduced=vocab_size < target.vocab_size)


if __name__ == '__main__':
  _TARGET = flags.DEFINE_string(
    'target_config',
    'configs/lm1b.py:97m',
    'Sizes of the target: FILE.py[:ARGUMENT] of configs/, a folder with config.json, or ORG/NAME on the hub, of which'
    ' config.json alone is read.',
  )
  _DRAFT = flags.DEFINE_string(
    'draft_config', 'configs/lm1b.py:6m', 'Sizes of the draft, as for the target; or configs/head.py:dspark.'
  )
  _METHOD = flags.DEFINE_string('method', 'race_block', f'One of {", ".join(METHODS)}.')
  _NUM_DRAFTS = flags.DEFINE_integer('num_drafts', 8, 'K, drafts per row.', lower_bound=1)
  _DRAFT_LENGTH = flags.DEFINE_integer('draft_length', 8, 'L, tokens per draft.', lower_bound=1)
  _BATCH_SIZE = flags.DEFINE_integer('batch_size', 64, 'Rows on all devices.', lower_bound=1)
  _PROMPT_LENGTH = flags.DEFINE_integer('prompt_length', 128, 'Tokens of the longest prompt.', lower_bound=1)
  _NEW_TOKENS = flags.DEFINE_integer('max_new_tokens', 128, 'New tokens per prompt, at most.', lower_bound=1)
  _DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'Type of weights, caches and activations.')
  _TOPOLOGY = flags.DEFINE_string('topology', 'v5e:4x4', 'Slice to compile for.')
  _MESH = flags.DEFINE_string('mesh', 'data:-1', 'Sizes of the mesh, such as data:8,model:2.')
  _DRAFT_MESH = flags.DEFINE_enum('draft_mesh', 'whole', DRAFT_MESHES, 'Whole on every device along model, or divided.')
  _EFFICIENCY = flags.DEFINE_list('block_efficiency', ['2', '3', '4', '5'], 'Tokens per target call to compute with.')
  _COLLECTIVE = flags.DEFINE_float(
    'collective_us', 1e6 * COLLECTIVE_SECONDS, 'Microseconds of a transfer between devices beside that of its bytes.',
    lower_bound=0,
  )  # fmt: skip
  _FILTERS = flags.DEFINE_boolean('filters', False, 'Count filters of the distributions, see --filter_names.')
  _NAMES = flags.DEFINE_multi_enum(
    'filter_names', list(FILTERS_BY_NAME), list(FILTERS_BY_NAME), 'The filters that --filters counts; may be repeated.'
  )
  _OUTPUT = flags.DEFINE_string('output', None, 'Write the report to this file, as JSON.')

  def main():
    jax.config.update('jax_platforms', 'cpu')  # constants need a device; an attached TPU stays free
    method = get_method(_METHOD.value)
    efficiencies = command_line.parse_numbers('block_efficiency', _EFFICIENCY.value, float)
    num_drafts = 1 if method.max_drafts == 1 else _NUM_DRAFTS.value
    target = read_config(_TARGET.value, _DTYPE.value)
    draft = read_draft(_DRAFT.value, target, _DTYPE.value)
    mesh = make_mesh(command_line.parse_sizes(_MESH.value), describe_topology(_TOPOLOGY.value))
    sizes = {'target_config': _TARGET.value, 'draft_config': _DRAFT.value}
    inputs = {name: files_of(path.split(':')[0]) for name, path in sizes.items()}
    with OutputFiles(output=_OUTPUT.value).apart_from(inputs) as files:
      report = analyse(
        DecodeSharding(mesh, is_draft_divided=_DRAFT_MESH.value == 'divided'),
        method,
        TokenTree.chains(num_drafts, _DRAFT_LENGTH.value),
        target=target,
        draft=draft,
        batch_size=_BATCH_SIZE.value,
        prompt_length=_PROMPT_LENGTH.value,
        max_new_tokens=_NEW_TOKENS.value,
        collective_seconds=1e-6 * _COLLECTIVE.value,
        filters=_NAMES.value if _FILTERS.value else (),
      )
      print(
        f'target {_TARGET.value} ({target.num_params / 1e6:.1f}M), draft {_DRAFT.value}'
        f' ({_num_params(draft, target.vocab_size) / 1e6:.1f}M)'
      )
      print(
        f'{method.name}, K = {num_drafts}, L = {_DRAFT_LENGTH.value}, {_BATCH_SIZE.value} rows with room for'
        f' {_PROMPT_LENGTH.value + _NEW_TOKENS.value} tokens; {_TOPOLOGY.value}, mesh'
        f' {" x ".join(f"{name} {size}" for name, size in mesh.shape.items())}, draft {_DRAFT_MESH.value}'
      )
      content = {'topology': _TOPOLOGY.value, 'mesh': _MESH.value, **report.as_dict()}
      files.write_after(lambda: print(describe(report, efficiencies)), output=json.dumps(content, indent=2) + '\n')
    report.memory.check(report.chip)

  command_line.run(
    main,
    [
      '',
      '--target_config=configs/hub/llama_3_8b --draft_config=configs/hub/draft_of_llama_3 --topology=v5e:2x4'
      ' --mesh=data:1,model:8 --batch_size=8',
      '--method=spectr --num_drafts=4 --draft_length=4 --filters',
    ],
  )
