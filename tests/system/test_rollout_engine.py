"""The rollout service as a process, with the real vLLM and a tiny model, against Hugging Face's
forward pass.

Two engine starts, four with the soak tests. torch, transformers and openai are imported where they
are used, so that collecting the fast tests stays fast. Tests run in the order of the file; the last
ones end their service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.rollout.rl_routes import PauseState
from shared.errors import BadRequest, Conflict, Failed, StateLost
from shared.host.processes import free_port
from shared.http.client import Client
from shared.http.operations import own_metrics
from shared.wire import (
    Aborted,
    AbortRequest,
    Canary,
    ConversationPrefix,
    Example,
    Fence,
    FolderWeights,
    GenerateRequest,
    Logprobs,
    Message,
    ModelRequest,
    NoBody,
    Rollout,
    RolloutGroup,
    Sampling,
    ServingWeights,
    Span,
    TokenIds,
)
from tests.support.rollout_bench import folder_weights
from tests.support.running import lives
from tests.support.tiny_models import save_tiny_qwen2

pytestmark = [pytest.mark.engine, pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EOS = 1
TOO_SLOW = "WARNING vllm.v1.utils: [shutdown] Process manager: force killing"
"""What vLLM logs of an engine that had no time to end, on a machine that does much else."""

TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if refuse %}{{ raise_exception('no') }}{% endif %}"
    "{% if add_generation_prompt %}{{ end or 'z' }}{% endif %}"
)
CHARACTERS = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" + string.ascii_letters + "012345678"
"""Byte-level as Qwen2's own tokenizer has it, which transformers puts in the place of any other:
the dotted G is a space."""


@dataclass
class Running:
    """A rollout service of our own, and its folders."""

    process: subprocess.Popen[bytes]
    url: str
    models: Path
    runs: Path
    tmp: Path
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.tmp)

    def children(self) -> list[int]:
        listed = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True
        ).stdout
        return [int(pid) for pid in listed.split()]

    def engine_pid(self) -> int:
        (pid,) = [
            pid
            for pid in self.children()
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return pid

    def publish(
        self,
        version: int,
        model: Path,
        job: str = "job",
        *,
        drop: str | None = None,
        fence: Fence = (0, 0),
        change: Callable[[dict[str, np.ndarray]], None] = lambda _: None,
    ) -> FolderWeights:
        """Publishes `model`'s weights as `version`, without the tensor `drop`, changed by
        `change`."""
        folder = self.runs / job / "weights" / f"{fence[0]}-{fence[1]}" / f"v{version}"
        folder.mkdir(parents=True)
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(
            {name: tensor for name, tensor in tensors.items() if name != drop},
            folder / "model.safetensors",
        )
        return folder_weights(folder, version, job, fence)


def start(folder: Path, **settings: str) -> Running:
    port = free_port()
    models = folder.parent / "models"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("HONE_")
    }
    environment |= {
        "HONE_ROLLOUT_PORT": str(port),
        "HONE_RUNS_DIR": str(folder / "runs"),
        "HONE_SHM_DIR": str(folder / "shm"),
        "TMPDIR": tempfile.mkdtemp(prefix="hr-"),
    }
    folder.mkdir()
    log = folder / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.rollout"],
            cwd=ROOT,
            env=environment | settings,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    running = Running(
        process,
        f"http://127.0.0.1:{port}",
        models,
        folder / "runs",
        Path(environment["TMPDIR"]),
        log,
    )
    wait_for(lambda: _answers(running.url), 20, "the service to listen")
    return running


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/healthz").status_code == 200
    return False


def wait_for(condition: object, seconds: float, what: str) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.25)


def make_model(folder: Path, seed: int, tied: bool) -> None:
    """Writes a tiny model whose heads have 32 dimensions: vLLM's CPU attention has no kernel for
    16."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    save_tiny_qwen2(folder, seed=seed, tie_word_embeddings=tied, num_heads=2)
    vocabulary = {token: id for id, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with tied embeddings, `tied` and `tied2`, and two without."""
    folder = tmp_path_factory.mktemp("rollout")
    for seed, name in enumerate(("tied", "tied2", "untied", "untied2")):
        make_model(folder / "models" / name, seed, tied=name.startswith("tied"))
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Running]:
    running = start(folder / "first")
    try:
        with httpx.Client(base_url=running.url, timeout=500) as http:
            answer = http.put(
                "/model",
                json={
                    "model": str(running.models / "tied"),
                    "dtype": "float32",
                    "sampling_masks": True,
                },
            )
            assert answer.status_code == 200, answer.text + running.log.read_text()[-3000:]
        yield running
    finally:
        running.kill()


@pytest.fixture
async def client(service: Running) -> AsyncIterator[Client]:
    async with Client("rollout", service.url, binary=True) as client:
        yield client


async def generate(client: Client, **request: object) -> RolloutGroup:
    body = GenerateRequest.model_validate({"prompt_token_ids": (5, 6, 7), **request})
    return await client.call("POST", "/generate", body, RolloutGroup, deadline_s=60)


async def reload(client: Client, ref: FolderWeights) -> ServingWeights:
    return await client.call("POST", "/reload_weights", ref, ServingWeights, deadline_s=60)


async def under_way(service: Running) -> bool:
    async with httpx.AsyncClient(base_url=service.url) as metrics:
        return "running_requests 0.0" not in (await metrics.get("/metrics")).text


def reference_logprobs(
    model: Path, token_ids: Sequence[int], first: int, temperature: float = 1.0
) -> list[float]:
    """Returns Hugging Face's log-probs of the tokens from index `first` on, in nats."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens_T = torch.tensor(list(token_ids))
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(network(tokens_T[None]).logits[0] / temperature, -1)
    return [logprobs_TV[t - 1, token_ids[t]].item() for t in range(first, len(token_ids))]


def assert_sampled_by(model: Path, group: RolloutGroup, temperature: float = 1.0) -> None:
    for rollout in group.rollouts:
        prompt = list(group.prompt_token_ids)
        tokens = prompt + list(rollout.token_ids)
        expected = reference_logprobs(model, tokens, len(prompt), temperature)
        assert list(rollout.logprobs) == pytest.approx(expected, abs=1e-4)


async def test_logprobs_are_hugging_faces_and_the_end_token_is_among_them(
    service: Running, client: Client
) -> None:
    group = await generate(client, sampling=Sampling(n=32, max_tokens=60))
    assert_sampled_by(service.models / "tied", group)
    ended = [rollout for rollout in group.rollouts if rollout.finish_reason == "stop"]
    assert ended, "none of 32 rollouts ended by itself"
    assert all(
        rollout.token_ids[-1] == EOS and EOS not in rollout.token_ids[:-1] for rollout in ended
    )
    assert all(
        len(rollout.token_ids) == 60
        for rollout in group.rollouts
        if rollout.finish_reason == "length"
    )
    assert all(rollout.versions == () for rollout in group.rollouts)


async def test_logprobs_are_of_the_distribution_after_temperature(
    service: Running, client: Client
) -> None:
    group = await generate(client, sampling=Sampling(n=4, max_tokens=8, temperature=0.5))
    assert_sampled_by(service.models / "tied", group, temperature=0.5)


async def test_text_is_what_the_tokenizer_decodes(service: Running, client: Client) -> None:
    from transformers import AutoTokenizer

    group = await generate(
        client, prompt_token_ids=None, prompt="a b", sampling=Sampling(max_tokens=8)
    )
    tokenizer = AutoTokenizer.from_pretrained(service.models / "tied")
    assert group.prompt_token_ids == (3, 2, 4)
    assert group.rollouts[0].text == tokenizer.decode(
        group.rollouts[0].token_ids, skip_special_tokens=True
    )


@pytest.mark.parametrize(("template_args", "end"), [({}, 28), ({"end": "y"}, 27)])
async def test_messages_are_rendered_by_the_chat_template_ready_for_the_answer(
    client: Client, template_args: dict[str, str], end: int
) -> None:
    group = await generate(
        client,
        prompt_token_ids=None,
        prompt=({"role": "user", "content": "a"},),
        template_args=template_args,
        sampling=Sampling(max_tokens=1),
    )
    assert group.prompt_token_ids == (3, 2, end)


async def test_a_seed_repeats_a_group_and_its_members_differ(client: Client) -> None:
    first, second = [
        await generate(client, sampling=Sampling(n=4, max_tokens=8, seed=3)) for _ in range(2)
    ]
    assert [r.token_ids for r in first.rollouts] == [r.token_ids for r in second.rollouts]
    assert len({r.token_ids for r in first.rollouts}) == 4


async def test_a_stop_token_ends_the_rollout_and_is_its_last_token(client: Client) -> None:
    (plain,) = (await generate(client, sampling=Sampling(max_tokens=6, seed=1))).rollouts
    end = plain.token_ids[2]
    (stopped,) = (
        await generate(client, sampling=Sampling(max_tokens=6, seed=1, stop_token_ids=(end,)))
    ).rollouts
    until = list(plain.token_ids).index(end) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (plain.token_ids[:until], "stop")


async def test_min_p_of_one_leaves_the_likeliest_token(client: Client) -> None:
    greedy = await generate(client, sampling=Sampling(max_tokens=8, temperature=0.0))
    likeliest = await generate(client, sampling=Sampling(n=3, max_tokens=8, min_p=1.0))
    assert {r.token_ids for r in likeliest.rollouts} == {greedy.rollouts[0].token_ids}


TRUNCATED = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"top_p": 0.9, "top_k": 5, "min_p": 0.05, "temperature": 0.7},
]


async def test_each_token_comes_with_those_it_could_have_been(
    service: Running, client: Client
) -> None:
    """While requests that are greedy or sample from the whole vocabulary share the engine's steps:
    the log-prob is the trainer's over the same tokens, and these are those of Hugging Face's
    logits."""
    whole = [{"n": 4}, {"temperature": 0.0, "top_k": 5}]
    *truncated, free, greedy = await asyncio.gather(
        *(
            generate(client, sampling=Sampling(max_tokens=40, **options))
            for options in (*({"n": 4, **some} for some in TRUNCATED), *whole)
        )
    )
    for group in (free, greedy):
        assert not any(rollout.kept_ids or rollout.kept_counts for rollout in group.rollouts)
    for group, options in zip(truncated, TRUNCATED, strict=True):
        for rollout in group.rollouts:
            expected = trainers_logprobs(service.models / "tied", group, rollout, **options)
            assert list(rollout.logprobs) == pytest.approx(expected, abs=1e-4)


def trainers_logprobs(
    model: Path,
    group: RolloutGroup,
    rollout: Rollout,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 64,
    min_p: float = 0.0,
) -> list[float]:
    """Returns the trainer's log-probs of the rollout, after checking that it could be sampled from
    the likeliest tokens by min-p, of these by top-k and of these by top-p."""
    import torch
    from transformers import AutoModelForCausalLM

    from services.trainer.learning.batch import collate
    from services.trainer.learning.policy import Policy

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = [*group.prompt_token_ids, *rollout.token_ids]
    kept = iter(rollout.kept_ids)
    kept_T = [{next(kept) for _ in range(count)} for count in rollout.kept_counts]
    with torch.no_grad():
        probs_TV = torch.softmax(network(torch.tensor([tokens])).logits[0] / temperature, -1)
        for probs_V, ids in zip(probs_TV[len(group.prompt_token_ids) - 1 :], kept_T, strict=False):
            sorted_V, ids_V = probs_V.sort(descending=True)
            sorted_V[sorted_V < min_p * sorted_V[0]] = 0
            sorted_V[top_k:] = 0
            sorted_V /= sorted_V.sum()
            before_V = sorted_V.cumsum(0) - sorted_V
            left_V = (sorted_V > 0) & ((before_V < top_p) | (top_p == 1))
            assert (ids or set(ids_V.tolist())) == set(ids_V[left_V].tolist())
        example = Example(
            prompt_token_ids=group.prompt_token_ids,
            token_ids=rollout.token_ids,
            kept_ids=rollout.kept_ids,
            kept_counts=rollout.kept_counts,
            advantage=1.0,
        )
        return Policy(network, temperature)(collate([example]))[0].tolist()


async def test_a_stop_string_ends_the_text_before_it_and_keeps_its_tokens(client: Client) -> None:
    (plain,) = (await generate(client, sampling=Sampling(max_tokens=6, seed=1))).rollouts
    end = plain.text[2]
    (stopped,) = (
        await generate(client, sampling=Sampling(max_tokens=6, seed=1, stop=(end,)))
    ).rollouts
    assert (stopped.text, stopped.finish_reason) == (plain.text.split(end)[0], "stop")
    assert stopped.token_ids == plain.token_ids[: len(stopped.text) + 1]


async def test_a_reload_changes_what_samples_and_says_so(service: Running, client: Client) -> None:
    ref = service.publish(1, service.models / "tied2")
    served = await reload(client, ref)
    assert (served.version, served.digest) == (1, ref.digest)
    group = await generate(client, sampling=Sampling(n=4, max_tokens=8), min_version=1)
    assert_sampled_by(service.models / "tied2", group)
    assert {rollout.versions for rollout in group.rollouts} == {(1,)}


async def test_cached_prefixes_of_the_old_weights_are_forgotten(
    service: Running, client: Client
) -> None:
    prompt = tuple(3 + i % 60 for i in range(200))
    await generate(client, prompt_token_ids=prompt, sampling=Sampling(max_tokens=2))
    await reload(client, service.publish(2, service.models / "tied"))
    group = await generate(client, prompt_token_ids=prompt, sampling=Sampling(max_tokens=2))
    assert_sampled_by(service.models / "tied", group)


async def test_a_version_without_a_tensor_is_refused_and_the_old_one_serves(
    service: Running, client: Client
) -> None:
    for number, drop in enumerate(("layers.1.mlp.down_proj", "norm", "embed_tokens")):
        name, job = f"model.{drop}.weight", f"without-{number}"
        ref = service.publish(3, service.models / "tied2", job=job, drop=name)
        with pytest.raises(Failed, match=f"tensors are missing, the first is '{name}'"):
            await reload(client, ref)
    group = await generate(client, sampling=Sampling(max_tokens=4))
    assert group.rollouts[0].versions == (2,)
    assert_sampled_by(service.models / "tied", group)


async def test_what_is_not_done_by_its_deadline_ends_there(
    service: Running, client: Client
) -> None:
    sampling = Sampling(n=8, max_tokens=250, temperature=1.0, min_p=0.0)  # some will be late
    group = await generate(client, sampling=sampling, deadline_s=0.2)
    late = [rollout for rollout in group.rollouts if rollout.finish_reason == "timeout"]
    assert late, [(one.finish_reason, len(one.token_ids)) for one in group.rollouts]
    assert all(rollout.error == "not finished within 0.2 s" for rollout in late)
    assert all(len(rollout.logprobs) == len(rollout.token_ids) < 250 for rollout in late)
    assert not await under_way(service)


async def test_a_reload_under_way_splits_a_rollout_between_versions(
    service: Running, client: Client
) -> None:
    ref = service.publish(4, service.models / "tied2")
    has_sampled, is_reloaded = asyncio.Event(), asyncio.Event()
    sampling = [
        asyncio.create_task(rollouts_until(is_reloaded, client, max_tokens, has_sampled))
        for max_tokens in (100, 250)
    ]
    await has_sampled.wait()  # the other group is in the middle
    await reload(client, ref)
    is_reloaded.set()
    rollouts = [rollout for task in sampling for rollout in await task]
    assert (2, 4) in {rollout.versions for rollout in rollouts}
    for rollout in rollouts:
        assert rollout.versions in {(2,), (2, 4), (4,)}
        starts = [span.start for span in rollout.spans]
        assert starts[0] == 0 and starts[-1] < len(rollout.token_ids)
    assert_sampled_by_two(
        service.models / "tied",
        service.models / "tied2",
        [rollout for rollout in rollouts if len(rollout.spans) == 2][:8],
    )


async def rollouts_until(
    is_over: asyncio.Event, client: Client, max_tokens: int, has_sampled: asyncio.Event
) -> list[Rollout]:
    """Samples groups one after another: half of a group's rollouts end within 45 tokens, and on a
    busy machine all may before the reload comes. Sets `has_sampled` after the first group."""
    rollouts: list[Rollout] = []
    while not is_over.is_set():
        group = await generate(client, sampling=Sampling(n=64, max_tokens=max_tokens))
        rollouts += group.rollouts
        has_sampled.set()
    return rollouts


def assert_sampled_by_two(older: Path, newer: Path, rollouts: Sequence[Rollout]) -> None:
    """Each token's log-prob is that of its own version alone, with nothing of the other's in it:
    vLLM computes the cache of a rollout that it continues with again. One token before or after the
    span's start, the log-probs would be another version's: of a token here and there both versions
    may think alike, of most they do not."""
    differences: list[float] = []
    for rollout in rollouts:
        tokens, start = [5, 6, 7, *rollout.token_ids], rollout.spans[1].start
        before, after = (reference_logprobs(model, tokens, 3) for model in (older, newer))
        expected = before[:start] + after[start:]
        assert list(rollout.logprobs) == pytest.approx(expected, abs=1e-4)
        differences += [abs(before[t] - after[t]) for t in (start - 1, start)]
    assert median(differences[::2]) > 1e-2 and median(differences[1::2]) > 1e-2


async def sample_held(service: Running, client: Client, **who: Any) -> asyncio.Task[Any]:
    """Begins to sample a group, and stops the engine first: else the group may have ended before a
    busy machine sees it under way."""
    os.kill(service.engine_pid(), signal.SIGSTOP)
    long = asyncio.create_task(generate(client, **who, sampling=Sampling(n=64, max_tokens=250)))
    while not await under_way(service):
        assert not long.done()
        await asyncio.sleep(0.01)
    return long


async def sent_and_let_go(service: Running, call: Coroutine[Any, Any, Any]) -> Any:
    """Sends the call, and then lets the engine continue."""
    sent = asyncio.create_task(call)
    await asyncio.sleep(0.5)
    os.kill(service.engine_pid(), signal.SIGCONT)
    return await sent


async def test_a_newer_epoch_ends_what_the_older_has_under_way(
    service: Running, client: Client
) -> None:
    await reload(client, service.publish(9, service.models / "tied2", fence=(1, 1)))
    older = {"job_id": "job", "attempt": 1, "epoch": 1}
    ref = service.publish(3, service.models / "tied", fence=(1, 2))
    long = await sample_held(service, client, **older)
    back = await sent_and_let_go(service, reload(client, ref))
    assert (back.version, back.fence) == (3, (1, 2))
    with pytest.raises(Conflict) as stale:
        await long
    assert stale.value.code == "stale"
    assert not await under_way(service)
    newer = {**older, "epoch": 2}
    group = await generate(client, **newer, min_version=3, sampling=Sampling(n=4, max_tokens=8))
    assert {rollout.spans for rollout in group.rollouts} == {(Span(version=3, start=0),)}
    assert_sampled_by(service.models / "tied", group)


async def test_an_abort_ends_what_a_job_has_under_way(service: Running, client: Client) -> None:
    who = {"job_id": "job", "attempt": 1, "epoch": 2}
    long = await sample_held(service, client, **who)
    async with httpx.AsyncClient(base_url=service.url) as metrics:
        told = own_metrics((await metrics.get("/metrics")).text, "rollout")
    assert told["running_tokens"] == 3 * told["running_requests"] > 0, "prompts of 3 tokens"
    abort = client.call("POST", "/abort", AbortRequest(**who), Aborted, deadline_s=60)
    ended = await sent_and_let_go(service, abort)
    with pytest.raises(Conflict):
        await long
    assert (ended.num_requests, await under_way(service)) == (1, False)


async def test_an_abort_while_sampling_is_paused_leaves_nothing_behind(
    service: Running, client: Client
) -> None:
    who = {"job_id": "job", "attempt": 1, "epoch": 3}
    await reload(client, service.publish(3, service.models / "tied", fence=(1, 3)))
    long = await sample_held(service, client, **who)
    pause = client.call("POST", "/pause", NoBody(), PauseState, deadline_s=60)
    await sent_and_let_go(service, pause)
    ended = await client.call("POST", "/abort", AbortRequest(**who), Aborted, deadline_s=10)
    with pytest.raises(Conflict):
        await long
    await client.call("POST", "/resume", NoBody(), PauseState, deadline_s=10)
    assert (ended.num_requests, await under_way(service)) == (1, False)
    assert_sampled_by(
        service.models / "tied", await generate(client, sampling=Sampling(n=4, max_tokens=8))
    )


async def test_a_prompt_that_the_template_refuses_is_data_to_a_job(
    service: Running, client: Client
) -> None:
    who = {"job_id": "job", "attempt": 1, "epoch": 4}
    await reload(client, service.publish(3, service.models / "tied", fence=(1, 4)))
    prompt = {
        "prompt_token_ids": None,
        "prompt": ({"role": "user", "content": "a"},),
        "template_args": {"refuse": True},
        "sampling": Sampling(n=2, max_tokens=1),
    }
    group = await generate(client, **who, **prompt)
    assert [rollout.finish_reason for rollout in group.rollouts] == ["error", "error"]
    assert "chat template refused the messages" in (group.rollouts[0].error or "")
    with pytest.raises(BadRequest, match="chat template refused the messages"):
        await generate(client, **prompt)


async def test_the_canarys_logprobs_are_hugging_faces(service: Running, client: Client) -> None:
    ids = (5, 6, 7, 8, 9, 10)
    canary = Canary(token_ids=TokenIds(ids), logprobs=Logprobs())
    ref = service.publish(4, service.models / "tied2", fence=(1, 4))
    served = await reload(client, ref.model_copy(update={"canary": canary}))
    expected = reference_logprobs(service.models / "tied2", ids, 1)
    assert list(served.canary_logprobs) == pytest.approx(expected, abs=1e-4)


async def test_a_logprob_that_is_not_finite_is_one_rollouts_fault(
    service: Running, client: Client
) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][:] = np.nan

    await reload(client, service.publish(5, service.models / "tied", fence=(1, 4), change=spoil))
    group = await generate(client, sampling=Sampling(n=2, max_tokens=4))
    assert [(r.finish_reason, r.token_ids) for r in group.rollouts] == [("error", ())] * 2
    assert "not finite" in (group.rollouts[0].error or "")
    await reload(client, service.publish(6, service.models / "tied", fence=(1, 4)))
    good = await generate(client, sampling=Sampling(n=2, max_tokens=8))
    assert_sampled_by(service.models / "tied", good)


async def cached_tokens(service: Running) -> float:
    async with httpx.AsyncClient(base_url=service.url) as metrics:
        (line,) = [
            line
            for line in (await metrics.get("/metrics")).text.splitlines()
            if line.startswith("hone_rollout_cached_prompt_tokens ")
        ]
    return float(line.split()[1])


async def test_generate_continues_the_tokens_of_all_turns_so_far(
    service: Running, client: Client
) -> None:
    prompt = tuple(3 + i * i % 61 for i in range(180))
    first = await generate(client, prompt_token_ids=prompt, sampling=Sampling(max_tokens=20))
    turns = (*prompt, *first.rollouts[0].token_ids, 9, 8, 7)
    before = await cached_tokens(service)
    second = await generate(client, prompt_token_ids=turns, sampling=Sampling(max_tokens=8))
    assert second.prompt_token_ids.data == TokenIds(turns).data
    # 199 of 200 tokens were computed, of which vLLM shares whole blocks of 32.
    assert await cached_tokens(service) - before == 192
    assert_sampled_by(service.models / "tied", second)


async def test_a_prompt_is_prefilled_once_for_its_group_and_what_is_few_shot_for_all(
    service: Running, client: Client
) -> None:
    # 180 tokens, of which vLLM shares whole blocks of 32; 140 of them are in both prompts.
    few_shot = tuple(3 + i * 7 % 61 for i in range(140))
    one, other = ((*few_shot, *(3 + (i + of) % 61 for i in range(40))) for of in (0, 20))

    async def cached_by(*prompts: tuple[int, ...], n: int = 1) -> float:
        sampling, before = Sampling(n=n, max_tokens=2), await cached_tokens(service)
        asked = [generate(client, prompt_token_ids=each, sampling=sampling) for each in prompts]
        await asyncio.gather(*asked)
        return await cached_tokens(service) - before

    assert await cached_by(one, one, one, one) == 3 * 160, "all but the first, though all at once"
    assert [await cached_by(one) for _ in range(2)] == [160, 160], "one that comes apart"
    assert await cached_by(other, other) == 128 + 160, "another question after the same examples"
    # Of rollouts that one request asks for, vLLM tells what the last to end had.
    assert await cached_by(tuple(reversed(one)), n=4) == 160
    assert await cached_by(tuple(reversed(other))[:37], n=4) == 32, "a short prompt"


async def test_the_openai_client_completes_streams_and_counts(service: Running) -> None:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0
    ) as api:
        models = await api.models.list()
        assert [model.id for model in models.data] == [str(service.models / "tied"), "policy"]
        done = await api.completions.create(
            model="policy",
            prompt="a b",
            max_tokens=4,
            n=2,
            logprobs=0,
            temperature=1.0,
            top_p=0.9,
            seed=1,
        )
        assert len(done.choices) == 2
        assert done.usage is not None and done.usage.prompt_tokens == 3
        assert (
            done.choices[0].logprobs is not None
            and len(done.choices[0].logprobs.token_logprobs or []) <= 4
        )
        said = [{"role": "user", "content": "a"}]
        chat = await api.chat.completions.create(
            model="policy", messages=said, max_tokens=6, seed=1, logprobs=True
        )  # pyright: ignore
        stream = await api.chat.completions.create(
            model="policy", messages=said, max_tokens=6, seed=1, stream=True
        )  # pyright: ignore
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert streamed == chat.choices[0].message.content
        end = streamed[-1]
        stopped = await api.chat.completions.create(
            model="policy", messages=said, max_tokens=6, seed=1, stop=[end]
        )  # pyright: ignore
        assert stopped.choices[0].message.content == streamed.split(end)[0]


async def test_the_openai_client_gets_typed_errors(service: Running) -> None:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0
    ) as api:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await api.completions.create(model="gpt-9", prompt="a")
        with pytest.raises(openai.BadRequestError, match="256"):
            await api.completions.create(model="policy", prompt=[5] * 300, max_tokens=10)


async def test_an_engine_that_dies_during_a_reload_is_state_lost_until_another_model(
    service: Running, client: Client
) -> None:
    engine = service.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    loading = asyncio.create_task(
        reload(client, service.publish(8, service.models / "tied", fence=(1, 4)))
    )
    await asyncio.sleep(1.0)
    assert not loading.done()
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(StateLost, match="the engine process died"):
        await asyncio.wait_for(loading, 60)
    assert httpx.get(f"{service.url}/readyz").status_code == 503
    assert "engine core exited unexpectedly" in service.log.read_text()
    with pytest.raises(StateLost, match="PUT /model starts a new one"):
        await generate(client)
    spec = ModelRequest(model=str(service.models / "untied"), dtype="float32")
    await client.call("PUT", "/model", spec, ServingWeights, deadline_s=240)
    assert_sampled_by(
        service.models / "untied", await generate(client, sampling=Sampling(n=2, max_tokens=8))
    )
    ref = service.publish(1, service.models / "untied2", job="untied", fence=(2, 0))
    await reload(client, ref)
    assert_sampled_by(
        service.models / "untied2", await generate(client, sampling=Sampling(n=2, max_tokens=8))
    )
    headless = service.publish(
        2, service.models / "untied2", job="untied", fence=(2, 0), drop="lm_head.weight"
    )
    with pytest.raises(Failed, match=r"the first is 'lm_head\.weight'"):
        await reload(client, headless)


async def test_an_engine_that_is_terminated_while_it_samples_loses_no_rollout(
    service: Running, client: Client
) -> None:
    engine = service.engine_pid()
    sampling = Sampling(n=16, max_tokens=200)
    asked = asyncio.create_task(generate(client, prompt_token_ids=[5, 6], sampling=sampling))
    while not await under_way(service):
        await asyncio.sleep(0.01)
    os.kill(engine, signal.SIGTERM)
    with pytest.raises(StateLost, match="the engine process died"):
        await asyncio.wait_for(asked, 60)


async def test_a_conversation_may_continue_from_what_older_weights_cached(
    service: Running, client: Client
) -> None:
    who = {"job_id": "kept", "attempt": 3, "epoch": 0}
    spec = {"model": str(service.models / "untied"), "dtype": "float32", "keep_prefixes": True}
    body = ModelRequest.model_validate({**spec, **who})
    await client.call("PUT", "/model", body, ServingWeights, deadline_s=240)
    await reload(client, service.publish(1, service.models / "untied", job="kept", fence=(3, 0)))
    messages: list[Message] = [{"role": "user", "content": "ab cd " * 25}]
    asked = {**who, "prompt_token_ids": None, "sampling": Sampling(max_tokens=6)}
    first = await generate(client, **asked, prompt=messages)
    await reload(client, service.publish(2, service.models / "untied2", job="kept", fence=(3, 0)))

    messages += [{"role": "assistant", "content": first.rollouts[0].text}]
    messages += [{"role": "user", "content": "continue"}]
    known = ConversationPrefix(
        num_messages=2,
        token_ids=TokenIds([*first.prompt_token_ids, *first.rollouts[0].token_ids]),
    )
    before = await cached_tokens(service)
    anew = await generate(client, **asked, prompt=messages, known=known)
    assert await cached_tokens(service) - before == 0
    assert_sampled_by(service.models / "untied2", anew)

    kept = known.model_copy(update={"version": 1})
    group = await generate(client, **asked, prompt=messages, known=kept)
    computed = len(known.token_ids) - 1
    assert await cached_tokens(service) - before == computed // 32 * 32 >= 128
    assert group.prompt_token_ids.data == anew.prompt_token_ids.data
    (rollout,) = group.rollouts
    assert rollout.versions == (2,)
    whole, num_prompt = [*group.prompt_token_ids, *rollout.token_ids], len(group.prompt_token_ids)
    for name in ("untied", "untied2"):
        alone = reference_logprobs(service.models / name, whole, num_prompt)
        differences = [abs(x - y) for x, y in zip(rollout.logprobs, alone, strict=True)]
        assert max(differences) > 1e-3, f"partly of {name}"


def test_a_terminated_service_leaves_nothing_and_ends_its_log_in_order(service: Running) -> None:
    """The signal goes to the service and all that it started, as Ctrl-C and a supervisor send
    it."""
    pids = service.children()
    assert len(pids) >= 1
    logged = service.log.stat().st_size
    os.killpg(service.process.pid, signal.SIGINT)
    assert service.process.wait(120) == 130
    wait_for(lambda: not any(map(lives, pids)), 2, f"processes {pids} to end")
    assert list(service.tmp.iterdir()) == []
    lines = service.log.read_bytes()[logged:].decode().splitlines()
    assert [line for line in lines if not line.startswith(("{", TOO_SLOW))] == []
    assert json.loads(lines[-1])["event"] == "service stopped"


@pytest.mark.soak
def test_the_engine_of_a_killed_service_dies_with_it(folder: Path) -> None:
    service = start(folder / "second", HONE_ROLLOUT_MODEL=str(folder / "models" / "tied"))
    try:
        assert httpx.get(f"{service.url}/readyz").status_code == 503
        wait_for(lambda: httpx.get(f"{service.url}/readyz").status_code == 200, 240, "the engine")
        pids = service.children()
        assert service.engine_pid() in pids
    finally:
        service.kill()
    wait_for(lambda: not any(map(lives, pids)), 5, f"processes {pids} to end")


@pytest.mark.soak
def test_a_service_killed_while_its_engine_starts_leaves_no_process(folder: Path) -> None:
    service = start(folder / "third", HONE_ROLLOUT_MODEL=str(folder / "models" / "tied"))
    try:
        wait_for(lambda: len(service.children()) == 2, 120, "the engine process to be there")
        pids = service.children()
    finally:
        service.kill()
    wait_for(lambda: not any(map(lives, pids)), 90, f"processes {pids} to end")
