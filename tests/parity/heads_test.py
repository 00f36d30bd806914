"""Published heads beside plain torch: chains of 5, ragged prompts, before and after a partial acceptance.

The reference is written from the papers and keeps nothing between rounds: it reads the whole text, token by token, with
the hidden states of the target behind it, then its own guesses with its own.
"""

import importlib

import jax
import numpy as np
import pytest
from published_heads import HEADS, HEADS_BY_NAME, IDS, KV_HEADS, LAYERS, D, V, arrays_of, tiny_target, write_head

from spectr_jax import SamplingParams, TokenTree, generate, load_drafter
from spectr_jax.io.hub.hub_model import load_hub_model
from tests.parity.rounds import TEMPERATURE, features_of, played

torch = pytest.importorskip('torch', reason='needs the extra parity')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest')]

LENGTH = 5
HEAD_DIM = D // HEADS


class Block:
  """What stands in every head: attention and MLP of Llama, from tensors by their published names below a prefix."""

  def __init__(self, tensors, prefix, *, base=10000.0, rotary=1.0, epsilon=1e-5, gain=0.0):
    self.tensors, self.prefix, self.base, self.epsilon, self.gain = tensors, prefix, base, epsilon, gain
    self.num_rotated = int(HEAD_DIM * rotary)

  def norm(self, name, x):
    scaled = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
    return scaled * (self.tensors[f'{name}.weight'] + self.gain)

  def product(self, name, x):
    return x @ self.tensors[f'{self.prefix}{name}.weight'].T

  def rotate(self, x):
    """`[S, heads, HEAD_DIM]`: pairs of a half each turn with the position."""
    size, half = len(x), self.num_rotated // 2
    angles = torch.arange(size)[:, None] / self.base ** (torch.arange(half) / half)
    cos, sin = (f(angles)[:, None].double() for f in (torch.cos, torch.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

  def attend(self, x):
    """Causal attention over all tokens, `[S, D]`."""
    size = len(x)
    q, k, v = (self.product(f'self_attn.{name}_proj', x).view(size, -1, HEAD_DIM) for name in 'qkv')
    if f'{self.prefix}self_attn.q_norm.weight' in self.tensors:
      q, k = self.norm(f'{self.prefix}self_attn.q_norm', q), self.norm(f'{self.prefix}self_attn.k_norm', k)
    q, k = self.rotate(q), self.rotate(k)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
    scores = torch.einsum('shd,thd->hst', q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
    return self.product('self_attn.o_proj', torch.einsum('hst,thd->shd', scores.softmax(-1), v).reshape(size, -1))

  def mlp(self, x):
    gate, up = self.product('mlp.gate_proj', x), self.product('mlp.up_proj', x)
    return self.product('mlp.down_proj', gate * torch.sigmoid(gate) * up)

  def finish(self, residual, x):
    """The stream after attention on `x` and the MLP."""
    x = residual + self.attend(x)
    return x + self.mlp(self.norm(f'{self.prefix}post_attention_layernorm', x))


class Eagle:
  layers = (-1,)

  def __init__(self, tensors, spec, embedding, output_head):
    self.block, self.tensors = Block(tensors, 'layers.0.'), tensors
    self.embedding, self.output_head = embedding, output_head

  def fuse(self, features):
    return features[:, 0]

  def step(self, embedded, hidden):
    joined = torch.cat([embedded, hidden], -1) @ self.tensors['fc.weight'].T + self.tensors['fc.bias']
    x = self.block.finish(joined, joined)
    return x, x @ self.output_head.T


class Eagle3:
  def __init__(self, tensors, spec, embedding, output_head):
    self.tensors, self.spec = tensors, spec
    sizes = spec.get('transformer_layer_config', {})
    self.prefix = 'layers.0.' if sizes else 'midlayer.'
    self.block = Block(tensors, self.prefix, base=sizes.get('rope_theta', 10000.0))
    self.layers = tuple(spec.get('eagle_aux_hidden_state_layer_ids', (2, LAYERS // 2, LAYERS - 3)))
    self.embedding = tensors.get('embed_tokens.weight', embedding)

  def fuse(self, features):
    if self.spec.get('fc_norm'):
      features = torch.stack([self.block.norm(f'fc_norm.{i}', features[:, i]) for i in range(3)], 1)
    joined = features.flatten(1)
    if self.spec.get('norm_before_fc'):
      joined = self.block.norm('input_norm', joined)
    return joined @ self.tensors['fc.weight'].T

  def step(self, embedded, hidden):
    normed = self.block.norm(f'{self.prefix}hidden_norm', hidden)
    residual = normed if self.spec.get('norm_before_residual') else hidden
    x = self.block.finish(residual, torch.cat([self.block.norm(f'{self.prefix}input_layernorm', embedded), normed], -1))
    output = self.block.norm('norm', x)
    logits = torch.full((len(x), V), -torch.inf, dtype=torch.float64)
    logits[:, torch.arange(len(IDS)) + self.tensors['d2t']] = output @ self.tensors['lm_head.weight'].T
    return output if self.spec.get('norm_output') else x, logits


class Mtp:
  layers = (-1,)

  def __init__(self, tensors, spec, embedding, output_head):
    options = {'base': spec.get('rope_theta', 10000.0), 'rotary': spec.get('partial_rotary_factor', 1.0)}
    if 'mtp.fc.weight' in tensors:
      self.names = 'mtp.fc', 'mtp.pre_fc_norm_embedding', 'mtp.pre_fc_norm_hidden', 'mtp.norm'
      self.block = Block(tensors, 'mtp.layers.0.', gain=1.0, **options)
      self.embedding, self.output_head = embedding, output_head
    else:
      prefix = f'model.layers.{LAYERS}.'
      self.names = tuple(f'{prefix}{name}' for name in ('eh_proj', 'enorm', 'hnorm', 'shared_head.norm'))
      self.block = Block(tensors, prefix, **options)
      self.embedding, self.output_head = (
        tensors[f'{prefix}embed_tokens.weight'],
        tensors[f'{prefix}shared_head.head.weight'],
      )
    self.tensors = tensors

  def fuse(self, features):
    return features[:, 0]

  def step(self, embedded, hidden):
    product, embedding_norm, hidden_norm, output_norm = self.names
    joined = torch.cat([self.block.norm(embedding_norm, embedded), self.block.norm(hidden_norm, hidden)], -1)
    x = joined @ self.tensors[f'{product}.weight'].T
    x = self.block.finish(x, self.block.norm(f'{self.block.prefix}input_layernorm', x))
    output = self.block.norm(output_norm, x)
    return output, output @ self.output_head.T


def recurrent_logits(head, text, features, guesses):
  """Logits `[L, V]` of a reference after the committed tokens, and after each of L guesses but the last."""
  hidden = list(head.fuse(features))
  tokens, found = list(text[1:]), []
  for guess in guesses:
    after, logits = head.step(head.embedding[tokens], torch.stack(hidden))
    found.append(logits[-1])
    hidden.append(after[-1])
    tokens.append(guess)
  return torch.stack(found)


class Medusa:
  layers = (-1,)

  def __init__(self, tensors, spec, embedding, output_head):
    self.tensors = tensors

  def all_logits(self, features):
    x = features[-1, 0]
    found = []
    for i in range(LENGTH):
      z = self.tensors[f'{i}.0.linear.weight'] @ x + self.tensors[f'{i}.0.linear.bias']
      found.append(self.tensors[f'{i}.1.weight'] @ (x + z * torch.sigmoid(z)))
    return torch.stack(found)


_REFERENCES = {
  'eagle': Eagle, 'eagle3': Eagle3, 'speculators': Eagle3, 'speculators joint': Eagle3, 'medusa': Medusa, 'mtp': Mtp,
  'deepseek mtp': Mtp,
}  # fmt: skip


@pytest.mark.parametrize('name', _REFERENCES)
def test_distributions_of_a_chain(tmp_path, name):
  target = tiny_target()
  drafter = load_drafter(write_head(tmp_path, name), target)
  tensors = {key: torch.tensor(array) for key, array in arrays_of(name).items()}
  tensors = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
  embedding = torch.tensor(np.asarray(target.params['embedding'])).double()  # it is the output head as well
  reference = _REFERENCES[name](tensors, HEADS_BY_NAME[name][0], embedding, embedding)
  assert drafter.feature_layers == reference.layers

  read = features_of(target, reference.layers)
  for _, rows in played(target, drafter, LENGTH, (9, 2, 5, 7)):
    for text, guesses, probs in rows:
      features = torch.tensor(np.asarray(read(text))).double()
      if name == 'medusa':
        logits = reference.all_logits(features)
      else:
        logits = recurrent_logits(reference, text, features, guesses)
      wanted = (logits / TEMPERATURE).log_softmax(-1).numpy()
      is_guessed = np.isfinite(wanted)
      np.testing.assert_array_equal(probs > 0, is_guessed)
      # Beside float64. Processors add up in different orders, and one distribution in dozens is off by more than 1e-4.
      np.testing.assert_allclose(probs[is_guessed], np.exp(wanted[is_guessed]), rtol=5e-4, atol=0)


class GatedMtp:
  """Qwen 3.5's layer, from the block of `transformers`, which leaves `mtp.*` out of its models."""

  layers = (-1,)

  def __init__(self, config, embedding, output_head):
    module = importlib.import_module('transformers.models.qwen3_5.modeling_qwen3_5')
    self.embedding, self.output_head = embedding, output_head
    width = config.hidden_size
    self.rotary = module.Qwen3_5TextRotaryEmbedding(config)
    self.modules = torch.nn.ModuleDict(
      {
        'fc': torch.nn.Linear(2 * width, width, bias=False),
        'layers': torch.nn.ModuleList([module.Qwen3_5DecoderLayer(config, config.layer_types.index('full_attention'))]),
        **{name: module.Qwen3_5RMSNorm(width) for name in ('pre_fc_norm_embedding', 'pre_fc_norm_hidden', 'norm')},
      }
    ).double()
    with torch.no_grad():
      for parameter in self.modules.parameters():
        parameter += (0.3 if parameter.ndim == 1 else 0.2) * torch.randn_like(parameter)

  def fuse(self, features):
    return features[:, 0]

  def step(self, embedded, hidden):
    own, size = self.modules, len(embedded)
    with torch.no_grad():
      joined = torch.cat([own['pre_fc_norm_embedding'](embedded), own['pre_fc_norm_hidden'](hidden)], -1)
      x = own['fc'](joined)[None]
      mask = torch.full((size, size), -torch.inf, dtype=x.dtype).triu(1)[None, None]
      angles = self.rotary(x, torch.arange(size)[None])
      output = own['norm'](own['layers'][0](x, position_embeddings=angles, attention_mask=mask))[0]
      return output, output @ self.output_head.T


@pytest.mark.parametrize('kind', ['text', 'multimodal'])
def test_the_layer_of_qwen3_5(tmp_path, kind):
  """Read from the folder of its target: distributions of chains, and greedy text."""
  from safetensors.torch import load_file, save_file

  from tests.parity import caches_test, families_test

  whole = caches_test._whole('qwen3_5') if kind == 'multimodal' else caches_test._reference('qwen3_5')
  whole.config.get_text_config()._attn_implementation = 'eager'
  output_head, embedding = (
    x.weight.detach().double() for x in (whole.get_output_embeddings(), whole.get_input_embeddings())
  )
  reference = GatedMtp(whole.config.get_text_config(), embedding, output_head)
  whole.save_pretrained(tmp_path)
  path = tmp_path / 'model.safetensors'
  own = {f'mtp.{name}': x.detach().float() for name, x in reference.modules.state_dict().items()}
  save_file(load_file(path) | own, path, metadata={'format': 'pt'})
  reference.modules.float().double()  # rounded as they were written
  target = load_hub_model(tmp_path)
  drafter = load_drafter(tmp_path, target)
  read = features_of(target, reference.layers)
  for _, rows in played(target, drafter, LENGTH, (9, 2, 5, 7)):
    for text, guesses, probs in rows:
      logits = recurrent_logits(reference, text, torch.tensor(np.asarray(read(text))).double(), guesses)
      wanted = (logits / TEMPERATURE).softmax(-1).numpy()
      np.testing.assert_allclose(probs, wanted, rtol=5e-4, atol=0)
  prompts, lengths = np.random.default_rng(0).integers(3, 61, (2, 7)), np.array([7, 3])
  options = {'max_new_tokens': 12, 'sampling': SamplingParams(0.0)}
  plain = generate(jax.random.key(0), target, None, prompts, lengths, method='autoregressive', **options)
  for method, tree in (('block', TokenTree.chains(1, 4)), ('race_traversal', families_test.TREE)):
    found = generate(jax.random.key(0), target, drafter, prompts, lengths, method=method, tree=tree, **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
