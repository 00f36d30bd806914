r"""A draft for a target of one's own, on text that the target writes.

Command   python -m train.head --config=configs/head.py:eagle3 --target=SmolLM2-135M-Instruct.Q4_1.gguf \
            --workdir=runs/smollm2_head
          or :medusa, :dspark, :dflash or :model in place of :eagle3
"""

import ml_collections


def get_config(kind: str = 'eagle3') -> ml_collections.ConfigDict:
  if kind not in ('eagle3', 'medusa', 'dspark', 'dflash', 'model'):
    raise ValueError(f'kind must be eagle3, medusa, dspark, dflash or model, got {kind!r}')
  config = ml_collections.ConfigDict()
  config.kind = kind

  # Conversations that the target has with itself, in files of `rows_per_shard` under WORKDIR/data; the first one is
  # held out. Answers have the temperatures in turn.
  config.num_shards = 16
  config.rows_per_shard = 96
  config.user_files = ''  # text files of messages, separated by commas, a blank line after each; '': the target's own
  config.max_user_tokens = 96
  config.max_new_tokens = 256
  config.user_temperature = 0.8
  config.temperatures = (1.0, 1.0, 0.6, 0.0)
  config.data_dtype = 'bfloat16'  # type that the target computes in

  # Draft. `init_from` is the folder of a head of these sizes, whose parameters and tokens a new run begins with, or of
  # any model with the target's tokenizer.
  config.init_from = ''
  is_one_pass = kind in ('dspark', 'dflash')
  if kind == 'model':
    config.num_layers = 4  # of the target's, of which the model is made without `init_from`
  else:
    # Whether it has an output head of its own, which begins as the target's rows and is trained; else it has these
    # rows.
    config.has_unembedding = kind == 'medusa'
  if kind in ('eagle3', 'medusa'):
    config.num_unrolled = 2  # guesses ahead of the target that are trained; Medusa has a head for each
  if kind == 'eagle3' or is_one_pass:
    # It is as wide as the target, and guesses the `vocab_size` tokens that are most frequent in the text.
    config.vocab_size = 8192
    config.mlp_dim = 0  # that of the target's layers if 0
    config.from_target = True  # whether blocks and norms begin as the target's last ones
  if is_one_pass:
    config.num_layers = 2
    config.block_size = 7  # tokens that it guesses
    config.mask_id = -1  # the token that fills slots that guess; -1: the first that ends a text
    config.markov_rank = 64 if kind == 'dspark' else 0  # of DSpark's sequential part; 0 for none
    config.markov_kind = 'vanilla'  # or `gated` or `rnn`
  # Loss. Weights of a guess relative to the one before; of the total variation; of the cross entropy, which is 1 where
  # there is no field; of -log(1 - total variation); and of the estimates of acceptance, of which 0 makes none.
  config.decay = 0.8
  config.tv_weight = 1.0
  if is_one_pass:
    config.ce_weight = 0.1 if kind == 'dspark' else 1.0
    config.lk_weight = 0.0
    config.confidence_weight = 1.0 if kind == 'dspark' else 0.0
  config.dtype = 'bfloat16'  # of activations and products; parameters are trained in float32

  # Devices: sizes of the mesh. Rows are sharded over `data`, and every device holds the whole draft.
  config.mesh = 'data:-1,model:1'

  # Optimization: AdamW, linear warm-up, cosine down to a tenth.
  config.seed = 0
  config.batch_size = 8
  config.num_steps = 1000
  config.learning_rate = 1e-3
  config.warmup_steps = 40
  config.weight_decay = 0.05
  config.adam_b2 = 0.98
  config.max_grad_norm = 1.0

  # Logs and checkpoints, all in steps.
  config.log_every = 10
  config.eval_every = 100
  config.checkpoint_every = 50
  config.keep_checkpoints = 2
  return config
