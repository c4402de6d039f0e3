"""A pass through a micro-batch reads no tensor's value on the host, which would wait for a GPU.
`tests/gpu` has the same test under CUDA's own check."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.learning.batch import collate
from services.trainer.learning.correction import loss_inputs, resolve
from services.trainer.learning.loss import Denominators, total_loss
from services.trainer.learning.metrics import StepMetrics
from services.trainer.learning.model_checks import choose_layout
from services.trainer.learning.policy import Policy
from services.trainer.zero.update import refusable
from shared.job import CorrectionSpec, TrainingSpec
from shared.job.running import MemorySpec
from shared.wire import Example, TokenIds

CPU = torch.device("cpu")


class HostReads(TorchDispatchMode):
    """Collects the operations that need a tensor's value before the host can continue."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "equal", "masked_select"):
            self.found.append(name)
        indices = args[1] if name.strip("_").startswith("index") and len(args) > 1 else ()
        if isinstance(indices, list | tuple) and any(
            each is not None and each.dtype is torch.bool for each in indices
        ):
            self.found.append(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


def examples() -> tuple[Example, ...]:
    prompt = TokenIds(range(20))
    return tuple(
        Example(
            prompt_token_ids=prompt,
            token_ids=TokenIds([21 + number, 22, 23 + number]),
            old_logprobs=[-1.0, -2.0, -3.0],
            kept_counts=TokenIds([2, 0, 1]),
            kept_ids=TokenIds([21 + number, 9, 23 + number]),
            advantage=1.0 - number,
        )
        for number in range(3)
    )


@pytest.mark.parametrize("shared_prefix", ["auto", "off"])
@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_a_pass_reads_no_value_on_the_host(one_rank, monkeypatch, shared_prefix, loss):
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    training = TrainingSpec(loss=loss, beta=0.1)
    correction = resolve(CorrectionSpec(method="sequence_tis"), 1)
    layout = choose_layout(model, "tiny", MemorySpec(shared_prefix=shared_prefix)).layout
    batch = collate(examples(), layout=layout)
    metrics = StepMetrics(CPU, training, correction, version=1, num_tokens=9)
    policy = Policy(model, 0.9, chunk_tokens=4)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("tolist() waits"))
    with HostReads() as reads:
        with torch.no_grad():
            before_N = policy(batch)[0]
        logprobs_N, entropies_N = policy(batch)
        x = loss_inputs(
            batch,
            logprobs_N,
            before_N=before_N,
            reference_N=before_N,
            correction=correction,
            denominators=Denominators(3, 9, 9, max_tokens=8),
            spec=training,
        )
        total = total_loss(x)
        metrics.add(batch, x, entropies_N, total)
        metrics.add_mismatch(batch, before_N)
        refusable(total, logprobs_N).backward()
    assert reads.found == []
    assert model.lm_head.weight.grad.isfinite().all()


def test_a_loss_that_is_not_finite_leaves_no_gradient_finite():
    logprobs_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    for loss, finite in ((logprobs_N[0] * 2, True), (logprobs_N.clamp(max=-9).sum() / 0, False)):
        (gradient_N,) = torch.autograd.grad(refusable(loss, logprobs_N), logprobs_N)
        assert gradient_N.isfinite().all() == finite and gradient_N.isnan().all() != finite
