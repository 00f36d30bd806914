"""The fields of every experiment. Each can be overridden on the command line (`--config.seed=1`)."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()

  # Text: a source of train/text_sources.py with its options, and the tokenizer's file.
  config.source = 'stdlib'
  config.files = ''  # for source "files": paths or globs, separated by commas
  config.held_out_percent = 1.0  # for sources without a held-out part of their own
  config.data_dir = ''  # for source "lm1b"; ~/tensorflow_datasets if empty
  config.tokenizer = 'runs/tokenizer.json'
  config.vocab_size = 4096
  config.cache_dir = ''  # directory for encoded text; WORKDIR/data if empty

  # Network: spectr_jax.models.causal_lm.lm1b_config. dtype is the type of activations and matmuls in training.
  config.model = ml_collections.ConfigDict(dict(embed_dim=96, num_layers=2, num_heads=3, mlp_dim=384, dtype='float32'))

  # The folder, file or name of a model of these sizes and this tokenizer, whose parameters a new run begins with;
  # random ones if empty.
  config.init_from = ''

  # Distillation: directory of the teacher, such as WORKDIR/model, the weight of its distributions in the loss, and the
  # type that it computes in; its own if empty. In bfloat16 its distributions are rounded, and a step takes less time.
  config.distill_from = ''
  config.distill_weight = 1.0
  config.distill_dtype = ''

  # Devices: sizes of the mesh, -1 for all remaining devices. Rows are sharded over `data`, parameters over `data` and
  # `model`. A batch is processed in `num_microbatches` parts. With `remat` blocks are recomputed for the gradient, so
  # that their activations are not stored.
  config.mesh = 'data:-1,model:1'
  config.num_microbatches = 1
  config.remat = False

  # Optimization: AdamW, linear warm-up, cosine down to a tenth.
  config.seed = 0
  config.seq_len = 512
  config.batch_size = 4
  config.num_steps = 1000
  config.learning_rate = 1e-3
  config.warmup_steps = 100
  config.weight_decay = 0.1
  config.dropout = 0.0
  config.adam_b2 = 0.98
  config.max_grad_norm = 1.0

  # Logs and checkpoints, all in steps.
  config.log_every = 20
  config.eval_every = 500
  config.eval_batches = 50
  config.checkpoint_every = 500
  config.keep_checkpoints = 2
  # Training stops after this number of evaluations without a better held-out loss and keeps the best model; 0 for
  # never.
  config.patience = 0
  return config
