"""`use_vllm=True, vllm_mode="server"` of a TRL script: the server samples, by `engines.vllm`."""

import pytest
from stand_in import StandIn
from test_engine import POLICY, ROWS, rewards

from grpo_jax.compat.migrate import from_trl
from grpo_jax.compat.scripts import from_trl_script
from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer
from grpo_jax.compat.trl_fields import ELSEWHERE

SERVER = {"use_vllm": True, "vllm_mode": "server"}
SMALL = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "max_steps": 2}


def trainer_of(args, **others):
    return GRPOTrainer(POLICY, rewards, args, ROWS, **others)


@pytest.mark.quick
@pytest.mark.parametrize("named", ["base_url", "host and port"])
def test_a_server_samples_for_a_script_of_trl(named):
    with StandIn(POLICY) as server:
        where = {"vllm_server_host": "127.0.0.1", "vllm_server_port": server.port}
        if named == "base_url":
            where = {"vllm_server_base_url": server.url, "vllm_server_port": 1}  # which the address outdoes, as in TRL
        trainer = trainer_of(GRPOConfig(**SMALL, **SERVER, **where, learning_rate=1e-2))
        trainer.train()
        assert len([body for _, body in server.drawn if body["max_tokens"] == 8]) == 2 * 8
        assert len(server.posts("/collective_rpc")) == 2
    assert trainer.config.sampler_correction == "sequence_mask"


@pytest.mark.quick
def test_the_settings_of_a_server_are_those_of_an_engine():
    moved = from_trl(
        {**SERVER, "vllm_server_base_url": "http://a:1/v1", "vllm_server_timeout": 30, "vllm_group_port": 5}
    )
    assert moved.sampler == ("http://a:1/v1", 30.0)
    assert list(moved.translated) == ["use_vllm"]
    assert moved.translated["use_vllm"] == "sampler=engines.vllm('http://a:1/v1', patience=30) of train"
    assert list(moved.left_out) == ["vllm_group_port"]
    assert not moved.missing
    everything = {name: field.default for name, field in ELSEWHERE.items() if name.startswith("vllm_server_")}
    assert from_trl({**SERVER, **everything}).sampler == ("http://127.0.0.1:8000", 240.0)
    run, _ = from_trl_script({"model_name_or_path": "a/b", **SERVER, "vllm_server_host": "b", "vllm_server_port": 81})
    assert run["sampler"] == {"vllm": {"base_url": "http://b:81", "patience": 240.0}}


@pytest.mark.quick
def test_without_a_server_the_built_in_sampler_samples_and_says_so():
    for values in ({"use_vllm": True}, {"use_vllm": True, "vllm_mode": "colocate"}):
        moved = from_trl(values)
        assert (moved.sampler, moved.missing) == (None, {})
        assert 'in a TRL script vllm_mode="server"' in moved.left_out["use_vllm"]
    moved = from_trl({"use_vllm": True, "vllm_server_base_url": "http://a:1"})
    assert moved.left_out["vllm_server_base_url"] == "vllm_mode is 'colocate': \"server\" lets a server of vLLM sample"
    assert from_trl({"vllm_mode": "server"}).left_out == {"vllm_mode": "use_vllm is False"}
    assert "'serve': \"server\" names a server" in from_trl({**SERVER, "vllm_mode": "serve"}).missing["vllm_mode"]


@pytest.mark.quick
def test_one_of_two_samplers_is_taken():
    def mine(**arguments):
        raise AssertionError("not called here")

    args = GRPOConfig(**SMALL, **SERVER)
    assert trainer_of(args, sampler=mine)._sampler is mine
    assert trainer_of(args, rollout_func=mine)._sampler is None
    with pytest.raises(ValueError, match="base_url is 'a:1': give http://host:port"):
        trainer_of(GRPOConfig(**SMALL, **SERVER, vllm_server_base_url="a:1"))
