"""One round of lossless speculative decoding with several drafts, in NumPy: the code that the trace page shows."""

import numpy as np


def draw(rng, law):
  """A token with the distribution `law`."""
  return int(rng.choice(len(law), p=law))


def residual(q, p):
  """What p leaves of q, normalized; q itself if that is nothing."""
  left = np.maximum(q - p, 0)
  return left / left.sum() if left.any() else q


def speculative_round(rng, text, draft, target, num_drafts, length):
  """Returns the tokens that one round adds to a text, which have the target's distribution.

  Args:
    rng: A generator of NumPy.
    text: The tokens so far, a list.
    draft, target: Functions from tokens to the probabilities of the next token.
    num_drafts, length: The number of independent drafts and the tokens of each.
  """
  drafts = []
  for _ in range(num_drafts):
    tokens, p = [], []
    for _ in range(length):
      p.append(draft(text + tokens))  # kept: the distribution that the guess is drawn from
      tokens.append(draw(rng, p[-1]))
    drafts.append((tokens, p, [target(text + tokens[:i]) for i in range(length + 1)]))  # one call for all in practice

  for i in range(length):
    p, rest = drafts[0][1][i], drafts[0][2][i]  # all remaining drafts agree so far, and so do their distributions
    for tokens, _, _ in drafts:
      x = tokens[i]
      if rng.random() < min(1, rest[x] / p[x]):  # p[x] > 0, since x was drawn from p
        break
      rest = residual(rest, p)
    else:
      return drafts[0][0][:i] + [draw(rng, rest)]  # the correction
    drafts = [each for each in drafts if each[0][i] == x]
  return drafts[0][0] + [draw(rng, drafts[0][2][length])]  # the bonus token
