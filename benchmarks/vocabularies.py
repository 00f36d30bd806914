"""How much of a draft's worth another vocabulary costs: what is shared, and how the draft reads the text.

Command   python -m benchmarks.vocabularies --target=MODEL.gguf --draft=OTHER.gguf --prompts=FILE --output=FILE.json
          Every flag of `decode.main` counts; --every=N takes each N-th position of the continuations
Text      the target's own continuations, decoded without a draft
Figures   means over positions. `kept` is the sum of min(p, q) at --temperature, what a single draft keeps of its first
          guess: with the committed tokens concatenated in the draft's tokens, as in decoding; with the text in the
          encoding of the draft's own tokenizer; and what would be kept by a draft equal to the target on shared tokens.
          `argmax` is the same for greedy decoding. Positions within a character are left out
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from common import command_line
from common.output_files import OutputFiles
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from spectr_jax import Model, SamplingParams, TokenTree, get_method, logits_to_probs
from spectr_jax.draft.vocabulary_drafter import VocabularyDrafter
from spectr_jax.io.load import open_model
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.sharding import fetch

_ROWS = 4  # texts of a call


def concatenated(drafter: VocabularyDrafter, tokens: list[int]) -> list[int]:
  """The draft's ids of a text of the target, as it reads them in decoding."""
  vocabulary = drafter.vocabulary
  text = jnp.asarray([tokens], jnp.int32)
  texts = vocabulary.texts(text, jnp.asarray([len(tokens)]), jnp.zeros(1, jnp.int32))
  places = jnp.arange(int(texts.lengths[0]))[None]
  return vocabulary.ids_at(texts, places)[0].tolist()


def canonical(
  drafter: VocabularyDrafter, tokens: list[int], target: TokenizerBase, draft: TokenizerBase
) -> list[int] | None:
  """The ids by the draft's own tokenizer, special tokens as in `concatenated`; None for a part of a character."""
  special, ids, part = target.special_token_names, [], []

  def end_part() -> bool:
    text = b''.join(target.token_bytes(part))
    part.clear()
    try:
      ids.extend(draft.encode(text.decode()))
    except UnicodeDecodeError:
      return False
    return True

  for token in tokens:
    if token not in special:
      part.append(token)
      continue
    if not end_part():
      return None
    ids.extend(drafter.vocabulary.draft_ids[token, : drafter.vocabulary.num_draft_ids[token]].tolist())
  if not end_part():
    return None
  bos_id = int(drafter.vocabulary.bos_id)
  return ids if bos_id < 0 or ids[:1] == [bos_id] else [bos_id, *ids]


@jax.jit
def _last_logits(model: Model, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
  cache, _ = model.prefill(tokens, lengths - 1, model.init_cache_fn(len(tokens), tokens.shape[1]))
  last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
  return model.apply(last, lengths[:, None] - 1, np.ones((1, 1), bool), cache).logits[:, 0]


def logits_after(model: Model, texts: list[list[int]]) -> list[np.ndarray]:
  longest, found = -(-max(map(len, texts)) // 64) * 64, []
  for first in range(0, len(texts), _ROWS):
    part = [*texts[first : first + _ROWS]]
    filled = [*part, *[part[-1]] * (_ROWS - len(part))]
    tokens = np.array([[*text, *[0] * (longest - len(text))] for text in filled], np.int32)
    found += [*np.asarray(_last_logits(model, tokens, np.array([len(text) for text in filled])))[: len(part)]]
  return found


def measure(workload: Workload, own: TokenizerBase, every: int) -> dict[str, Any]:
  """The figures, by name, of a draft whose tokenizer is `own`, at each `every`-th position; a `ValueError` if draft and
  target have the same vocabulary.
  """
  drafter, sampling = workload.draft, workload.sampling
  if not isinstance(drafter, VocabularyDrafter):
    raise ValueError('the draft must have another vocabulary than the target')
  alone = Setting(get_method('autoregressive'), TokenTree())
  texts: list[list[int]] = []
  for batch in workload.batches:
    result = fetch(workload.generate(alone, workload.keys(workload.options.seed), batch))
    for row, place in enumerate(batch):
      prompt = workload.tokens[place, : workload.lengths[place]].tolist()
      new = result.tokens[row, : result.lengths[row]].tolist()
      texts += [prompt + new[:size] for size in range(every // 2, len(new), every)]
  pairs = [(text, canonical(drafter, text, workload.tokenizer, own)) for text in texts]
  pairs = [(text, ids) for text, ids in pairs if ids is not None]
  texts, others = [text for text, _ in pairs], [ids for _, ids in pairs if ids is not None]
  joined = [concatenated(drafter, text) for text in texts]
  params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p).for_rows(1)
  is_shared = np.asarray(drafter.vocabulary.is_shared(jnp.arange(drafter.vocab_size)))
  is_guessed = np.asarray(drafter.vocabulary.to_target) >= 0

  def law(logits) -> np.ndarray:
    return np.asarray(logits_to_probs(jnp.asarray(logits)[None, None], params)[0, 0])

  rows = []
  for target, by_part, by_text in zip(
    logits_after(workload.target, texts), logits_after(drafter.model, joined), logits_after(drafter.model, others)
  ):
    q, plain = law(target), np.asarray(jax.nn.softmax(by_part.astype(np.float32)))
    p, best = (law(drafter.vocabulary.restrict(jnp.asarray(each))) for each in (by_part, by_text))
    rows.append(
      {
        'share_of_draft_mass': plain[is_guessed].sum(),
        'share_of_target_mass': q[is_shared].sum(),
        'kept_concatenated': np.minimum(p, q).sum(),
        'kept_canonical': np.minimum(best, q).sum(),
        'kept_more_by_canonical': np.minimum(best, q).sum() - np.minimum(p, q).sum(),
        'argmax_concatenated': float(p.argmax() == target.argmax()),
        'argmax_canonical': float(best.argmax() == target.argmax()),
      }
    )
  means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
  errors = {name: float(np.std([row[name] for row in rows]) / len(rows) ** 0.5) for name in rows[0]}
  sizes = {
    'positions': len(rows),
    'same_encoding': float(np.mean([one == other for one, other in zip(joined, others)])),
    'draft_tokens_per_token': float(np.mean([len(ids) / len(text) for ids, text in zip(joined, texts)])),
    'canonical_tokens_per_token': float(np.mean([len(ids) / len(text) for ids, text in zip(others, texts)])),
  }
  return sizes | {'means': means, 'standard_errors': errors}


if __name__ == '__main__':
  from decode.experiment.option_flags import read_values  # defines flags

  _EVERY = flags.DEFINE_integer('every', 4, 'Of how many positions one is taken.', lower_bound=1)
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the figures.')

  def main(argv):
    del argv
    options = DecodeOptions(**read_values())
    with OutputFiles(output=_OUTPUT.value).apart_from(options.inputs()) as outputs:
      workload = Workload.load(options)
      found = measure(workload, open_model(options.draft_model).tokenizer(), _EVERY.value)
      content = json.dumps({'run': workload.info} | found, indent=2)
      outputs.write_after(lambda: print(json.dumps(found, indent=2)), output=content)

  command_line.run(main, ['--target=MODEL.gguf --draft=OTHER.gguf --prompts=prompts.txt'])
