"""What a job's events say of the trainer that loaded it."""

from typing import Any

from services.orchestrator.store.journal import Journal
from shared.wire import TrainerState


class Store:
    def __init__(self) -> None:
        self.said: list[str] = []

    async def report(self, _lease: Any, _kind: str, message: str, *_: Any, **__: Any) -> None:
        self.said.append(message)


async def test_a_model_that_cannot_share_prefixes_says_why() -> None:
    store: Any = Store()
    without = "prompts are computed again for each completion, because the model has 'mamba' layers"
    state = TrainerState(
        job_id="j",
        step=0,
        num_ranks=1,
        dtype="float32",
        device="cpu",
        num_parameters=1000,
        without=without,
    )
    await Journal(store, lease=None).loaded(state)
    assert store.said == [without, "the trainer has 1,000 parameters as float32, 1 rank on cpu"]
    await Journal(store, lease=None).loaded(state.model_copy(update={"without": ""}))
    assert len(store.said) == 3
