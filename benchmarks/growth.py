"""The growth of a round's time and memory with K, L, rows, cache length and vocabulary.

Command   python -m benchmarks.growth --output=growth.json --picture=growth.png
Models    random weights: a target of 6 layers, width 256, and a draft of 2 layers, width 96; float32
Point     K = 4, L = 4, one row, room for 256 tokens, vocabulary 4096; one size at a time is another

The times are those of whole rounds of the loop, medians over runs of several rounds in which all points take turns, and
those of a round's parts as separate programs. Caches are half full. Memory is the compiler's figure for the program.
Its floor is the memory of weights, caches and the two models' distributions.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
from absl import flags

from benchmarks import timing
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import latency
from decode.experiment.workload import describe_machine
from decode.papers import plots
from spectr_jax import TokenTree
from spectr_jax.aot.compile import compile_decode
from spectr_jax.aot.hlo_report import Memory
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.methods import METHODS, get_method
from spectr_jax.models.causal_lm import causal_lm, lm1b_config
from spectr_jax.models.transformer import init_params
from spectr_jax.sharding import make_mesh

NUM_ROUNDS = 8  # per timed run


@dataclasses.dataclass(frozen=True)
class Point:
  """The sizes of a round."""

  num_drafts: int = 4  # K
  draft_length: int = 4  # L, in tokens
  batch_size: int = 1
  cache_length: int = 256  # of a row, in tokens
  vocab_size: int = 4096


# By panel the size that varies, and its values.
AXES: dict[str, tuple[str, tuple[int, ...]]] = {
  'K, drafts of 4 tokens': ('num_drafts', (1, 2, 4, 8, 16, 32)),
  'L, 4 drafts': ('draft_length', (1, 2, 4, 8, 16)),
  'rows': ('batch_size', (1, 2, 4, 8, 16, 32)),
  'tokens of room': ('cache_length', (128, 256, 512, 1024, 2048, 4096)),
  'vocabulary': ('vocab_size', (1024, 2048, 4096, 8192, 16384, 32768, 65536)),
}
TIMES = ('round', 'draft', 'target', 'verification')
_MEMORY = {'memory': 'bytes', 'least memory': 'floor_bytes'}


def _models(point: Point):
  sizes = {'vocab_size': point.vocab_size, 'context_length': point.cache_length}
  configs = (
    lm1b_config(embed_dim=256, num_layers=6, num_heads=8, mlp_dim=1792, **sizes),
    lm1b_config(embed_dim=96, num_layers=2, num_heads=4, mlp_dim=384, **sizes),
  )
  return [causal_lm(init_params(jax.random.key(i), config), config).for_decoding() for i, config in enumerate(configs)]


def make_decoder(point: Point, method: str, sharding: DecodeSharding | None = None) -> Decoder:
  """The decoder of a point by a method, on one device without a sharding."""
  tree = TokenTree.chains(1 if METHODS[method].max_drafts == 1 else point.num_drafts, point.draft_length)
  sizes = {'max_new_tokens': point.cache_length // 2, 'cache_size': point.cache_length}
  return Decoder.make(*_models(point), method=method, tree=tree, sharding=sharding, **sizes)


def prompts(point: Point) -> np.ndarray:
  """Prompts that fill half of the caches."""
  shape = point.batch_size, point.cache_length // 2
  return np.random.default_rng(0).integers(0, point.vocab_size, shape).astype(np.int32)


def memory(point: Point, method: str) -> dict[str, int]:
  """The bytes of memory that the loop of a point takes by a method, and their floor."""
  target, draft = _models(point)
  sharding = DecodeSharding(make_mesh({'data': 1, 'model': 1}, jax.devices()[:1]))
  decoder = make_decoder(point, method, sharding)
  compiled = compile_decode(decoder, batch_size=point.batch_size, prompt_length=point.cache_length // 2)
  num_distributions = 2 * decoder.tree.num_nodes + 1
  caches = [jax.eval_shape(lambda m=m: m.init_cache_fn(point.batch_size, point.cache_length)) for m in (target, draft)]
  arrays = jax.tree.leaves([target.params, draft.params, caches])
  floor = sum(x.size * x.dtype.itemsize for x in arrays) + 4 * point.batch_size * num_distributions * point.vocab_size
  return {'bytes': Memory.of(compiled).total, 'floor_bytes': floor}


def measure(points: list[Point], method: str, num_runs: int) -> list[dict[str, float]]:
  """Seconds and bytes of each point by a method, medians over so many runs."""

  def begin(point: Point):
    return timing.begin(make_decoder(point, method), prompts(point))

  measured = []
  for point in points:
    measured.append(latency.time_parts(*begin(point), num_runs) | memory(point, method))
    jax.clear_caches()  # the programs of all points' parts would not fit in one process
    print(point, flush=True)
  rounds = timing.rounds_in_turns({point: functools.partial(begin, point) for point in points}, num_runs, NUM_ROUNDS)
  return [each | {'round': float(np.median(rounds[point]))} for point, each in zip(points, measured)]


def draw(rows: list[dict], method: str) -> bytes:
  """A PNG with a panel of times for each size, and a panel of memory below it, from the rows of the output file."""
  figure, axes = plots.panels(len(AXES), rows=2, width=2.6, height=2.6)
  for place, (name, (field, sizes)) in enumerate(AXES.items()):
    points = [dataclasses.asdict(Point(**{field: size})) for size in sizes]
    own = [next(row for row in rows if row['point'] == point) for point in points]
    of_time, of_memory = axes[place], axes[len(AXES) + place]
    for shade, part in zip(plots.SHADES, TIMES):
      of_time.plot(sizes, [1e3 * row[part] for row in own], 'o-', color=shade, label=part, markersize=3)
    for shade, (label, column) in zip(plots.SHADES[len(TIMES) :], _MEMORY.items()):
      of_memory.plot(sizes, [row[column] / 2**20 for row in own], 's-', color=shade, label=label, markersize=3)
    for panel, unit in ((of_time, 'milliseconds'), (of_memory, 'MiB')):
      plots.name_axes(panel, x=name, y='' if place else unit)
      plots.number_ticks(panel, sizes if len(sizes) < 7 else sizes[::2])
      panel.set_ylim(0)
  plots.legend(figure, axes)
  return plots.to_image(figure, title=f'Time of a round, of its parts, and memory, {method}', kind='png')


if __name__ == '__main__':
  _METHOD = flags.DEFINE_string('method', 'race_block', f'One of {", ".join(METHODS)}, with a draft.')
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 7, 'Runs of each point.', lower_bound=1)
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')
  _PICTURE = flags.DEFINE_string('picture', None, 'PNG file for the picture.')

  def main(argv):
    del argv
    if get_method(_METHOD.value).max_drafts == 0:
      raise ValueError(f'{_METHOD.value} has no draft; nothing grows')
    if _PICTURE.value:
      plots.check_available()
    points = list(dict.fromkeys(Point(**{field: size}) for field, sizes in AXES.values() for size in sizes))
    with OutputFiles(output=_OUTPUT.value, picture=_PICTURE.value) as files:
      measured = measure(points, _METHOD.value, _NUM_RUNS.value)
      rows = [{'point': dataclasses.asdict(point)} | each for point, each in zip(points, measured)]
      lines = [
        f'{row["point"]}: ms {", ".join(f"{part} {1e3 * row[part]:.2f}" for part in TIMES)};'
        f' {row["bytes"] / row["floor_bytes"]:.2f} of the least memory'
        for row in rows
      ]
      files.write_after(
        lambda: print('\n'.join(lines)),
        output=json.dumps({'run': describe_machine(), 'method': _METHOD.value, 'rows': rows}, indent=2) + '\n',
        picture=draw(rows, _METHOD.value) if _PICTURE.value else None,
      )

  command_line.run(main)
