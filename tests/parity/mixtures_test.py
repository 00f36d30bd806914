"""The routing of DeepSeek, and numbers of MXFP4 and of 8 bits in blocks, beside `transformers`."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_hub import Recorded

from spectr_jax.io.hub.fused_experts import FusedExperts
from spectr_jax.io.hub.scaled_tensors import ScaledTensors
from spectr_jax.models.routing import Experts, route

torch = pytest.importorskip('torch', reason='needs the extra parity')
transformers = pytest.importorskip('transformers', reason='needs the extra parity')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest')]


@pytest.mark.parametrize('is_normalized', [True, False])
def test_routing_of_deepseek(is_normalized):
  from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

  config = transformers.DeepseekV3Config(
    hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, norm_topk_prob=is_normalized,
    routed_scaling_factor=2.5,
  )  # fmt: skip
  torch.manual_seed(0)
  router, x = deepseek.DeepseekV3TopkRouter(config), torch.randn(40, 16)
  router.weight.data, router.e_score_correction_bias = torch.randn(16, 16), torch.rand(16)
  with torch.no_grad():
    _, weights, chosen = router(x)
  rules = Experts(
    16, 4, 8, scores='sigmoid', is_normalized=is_normalized, scale=2.5, num_groups=4, num_chosen_groups=2,
    has_choice_bias=True,
  )  # fmt: skip
  params = {'kernel': jnp.asarray(router.weight.detach().numpy().T)}
  params['choice_bias'] = jnp.asarray(router.e_score_correction_bias.numpy())
  own, own_weights = map(np.asarray, route(params, rules, jnp.asarray(x.numpy())))
  order, theirs = np.argsort(own, axis=1), np.argsort(chosen.numpy(), axis=1)  # theirs have no order
  np.testing.assert_array_equal(np.take_along_axis(own, order, 1), np.take_along_axis(chosen.numpy(), theirs, 1))
  expected = np.take_along_axis(weights.numpy(), theirs, 1)
  np.testing.assert_allclose(np.take_along_axis(own_weights, order, 1), expected, rtol=1e-5)


def test_numbers_of_mxfp4():
  from transformers.integrations.mxfp4 import convert_moe_packed_tensors

  rng, name = np.random.default_rng(0), 'model.layers.0.mlp.experts.gate_up_proj'
  blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
  scales = rng.integers(100, 150, (2, 6, 3), np.uint8)
  expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
  assert expected.shape == (2, 96, 6)
  tensors = FusedExperts(Recorded({f'{name}_blocks': blocks, f'{name}_scales': scales}), 2)
  for expert in range(2):
    for place, part in enumerate(('gate', 'up')):
      own = f'model.layers.0.mlp.experts.{expert}.{part}_proj.weight'
      found = tensors.read(own, (slice(0, 3), slice(0, 96)))
      np.testing.assert_array_equal(found, expected[expert, :, place::2].numpy().T)
      np.testing.assert_array_equal(tensors.read(own, (slice(1, 3), slice(7, 70))), found[1:3, 7:70])


def test_numbers_of_8_bits_in_blocks():
  from transformers.integrations.finegrained_fp8 import Fp8Dequantize

  rng, name = np.random.default_rng(0), 'model.layers.0.mlp.down_proj.weight'
  values = rng.normal(size=(256, 384)).astype(ml_dtypes.float8_e4m3fn)
  scales = rng.uniform(0.1, 3, (2, 3)).astype(np.float32)
  theirs = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
  expected = Fp8Dequantize(None)._dequantize_one(theirs, torch.from_numpy(scales), torch.float32)
  tensors = ScaledTensors(Recorded({name: values, f'{name}_scale_inv': scales}), '_scale_inv', (128, 128))
  np.testing.assert_array_equal(tensors.read(name, (slice(0, 256), slice(0, 384))), expected.numpy())
