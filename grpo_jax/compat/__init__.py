"""For those who come from TRL: its trainer's interface, and a translation of its settings."""

from grpo_jax.compat.callbacks import RichProgressCallback
from grpo_jax.compat.migrate import from_trl
from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RichProgressCallback", "from_trl"]

_OF_TRL = "is TRL's own: import it from trl, where that is installed"
_ELSEWHERE = {
    "TrlParser": "takes dataclasses, and GRPOConfig is none here: give GRPOConfig its values in the script, or make a"
    " RUN.yaml of the script's YAML by grpo-jax from-trl",
    **dict.fromkeys(("ModelConfig", "ScriptArguments", "DatasetMixtureConfig"), _OF_TRL),
    **dict.fromkeys(("get_peft_config", "get_quantization_config", "get_dataset"), _OF_TRL),
    "LogCompletionsCallback": "is log_completions=True of GRPOConfig here",
    "SyncRefModelCallback": "is sync_ref_model=True of GRPOConfig here",
}


def __getattr__(name: str) -> object:
    """Say of a name of `trl` where it is."""
    if name in _ELSEWHERE:
        raise ImportError(f"{name} {_ELSEWHERE[name]}")
    raise AttributeError(f"grpo_jax.compat has no {name}: it has {', '.join(__all__)}")
