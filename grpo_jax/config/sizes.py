"""The batch sizes that the fields of a config come to on a number of devices."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """The sizes of an iteration, its updates and their micro-batches, over all devices.

    ```
    iteration:  prompts × G = completions          sampled together from one snapshot of the policy
      pass:     num_iterations (μ) times over the same completions
        update: minibatches in a pass; prompts_per_update prompts each; one optimizer step each
          micro-batch: micro_batches in an update; [micro_prompts, micro_completions] completions each
    ```

    Attributes:
      prompts: B, prompts of an iteration, over all devices.
      completions: B × G, completions of an iteration, over all devices (TRL's `generation_batch_size`).
      minibatches: that one pass over the completions is cut into, along B.
      updates: optimizer steps of an iteration, `num_iterations` × `minibatches`.
      prompts_per_update: prompts in one minibatch, over all devices.
      micro_batches: micro-batches of one minibatch (`gradient_accumulation_steps`).
      micro_prompts: prompts in one micro-batch, over all devices.
      micro_completions: completions of each of them in one micro-batch: G, or a divisor of G when a micro-batch is
        smaller than a group.
    """

    prompts: int
    completions: int
    minibatches: int
    updates: int
    prompts_per_update: int
    micro_batches: int
    micro_prompts: int
    micro_completions: int
