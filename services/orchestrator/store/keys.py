"""Every key that the orchestrator has in Redis, and the scripts that change them.

    hone:store                   string  the identity of this Redis (identity.py)
    hone:jobs                    zset    every job id by creation time
    hone:queue                   zset    ids of the jobs that wait to begin, by priority and age
    hone:begun                   zset    ids of begun jobs that neither ended nor paused, likewise:
                                         running, or interrupted and to continue first
    hone:submitted               string  `submitted_ms` of the newest job
    hone:ended                   zset    ids of ended jobs by the time they ended, for retention
    hone:unended                 zset    <API key>/<id> of the jobs of API keys that have not ended,
                                         for the quota
    hone:attempts                string  the attempt of the lease given last, for all jobs
    hone:job:<id>                hash    the record, and what only the scripts use (see below)
    hone:job:<id>:events         stream  what happened, in order
    hone:job:<id>:checkpoints    hash    step -> the checkpoint, as JSON
    hone:lease:<resource>        string  attempt of the worker that has that trainer or sampler;
                                         expires. Workers of jobs that share it have keys of their
                                         own, which end with the place: `#2` and on
    hone:samplers                set     names of samplers that registered themselves
    hone:sampler:<name>          string  the registration, as JSON; expires
    hone:trainers                set     names of trainers that their workers registered
    hone:trainer:<trainer>/<host>  string  the registration by the worker on that host, as JSON;
                                         expires
    hone:key:<idempotency key>   string  job id and fingerprint of its submission, or 'withdrawn';
                                         for a day
    hone:withdrawn:<API key>     zset    such keys that an API key withdrew, by when they expire
    hone:call:<call>             string  answer of a script's call, for a retry of the same call
    hone:deleted:<id>            string  the job was deleted; for a day
    hone:removed:<file>          string  when the uploaded file that was removed had been made, in
                                         Unix seconds; for a day

A job's hash has the fields of `wire.JobRecord`, and besides:

    schema            version of what `store.py` wrote
    submitted_ms      its age in the queue: Unix milliseconds of its submission, no two alike
    priority          the job's
    attempt, trainer, samplers, trainer_place  the newest lease given for the job, and what it is on
    shares            what jobs that may share a trainer have alike (`Job.shares_as`); '': it shares
                      with none
    owner             the worker that has it, for people
    tries             how often a worker took the job up since its last new step
    furthest          the last of the steps that ever were done
    key, fingerprint  the idempotency key of its submission, and what it was used for
    openai            "1" if it was submitted in OpenAI's shape
    models            the models that a job of 0 steps evaluates, as a JSON list
    files             the ids of the uploaded files that it names, with blanks between them
    last_<type>       the newest step that has an event of this type (step, eval, checkpoint)

Every change of a job is one atomic script, `lua/<name>.lua`, whose first lines say what it does.
`lua/shared.lua` has the building blocks.

    queued --take--> running --report--> succeeded, failed, cancelled
      ^ ^              |
      | +-----halt-----+----halt
      |                v
      +----resume--- paused          cancel: queued and paused at once, running by way of the worker

A running job whose worker is gone waits to be taken again: it is paused and cancelled at once too.

A worker sends its lease: the job, the trainer and the attempt. Once the trainer's lease has expired
or is another worker's, or the job does not run any more, nothing is changed.
"""

from __future__ import annotations

from pathlib import Path

from shared.settings import MAX_PLACES

STORE = "hone:store"
JOBS = "hone:jobs"
QUEUE = "hone:queue"
BEGUN = "hone:begun"
SUBMITTED = "hone:submitted"
ENDED = "hone:ended"
UNENDED = "hone:unended"
ATTEMPTS = "hone:attempts"
JOB = "hone:job:"
EVENTS = ":events"
CHECKPOINTS = ":checkpoints"
LEASE = "hone:lease:"
SAMPLERS = "hone:samplers"
SAMPLER = "hone:sampler:"
TRAINERS = "hone:trainers"
TRAINER = "hone:trainer:"
KEY = "hone:key:"
WITHDRAWN = "hone:withdrawn:"
CALL = "hone:call:"
DELETED = "hone:deleted:"
REMOVED = "hone:removed:"

TYPES = {
    STORE: "string",
    JOBS: "zset",
    QUEUE: "zset",
    BEGUN: "zset",
    SUBMITTED: "string",
    ENDED: "zset",
    UNENDED: "zset",
    ATTEMPTS: "string",
    SAMPLERS: "set",
    TRAINERS: "set",
}
"""Redis's type of each key that exists once."""


def types_of(job_id: str) -> dict[str, str]:
    """Returns the types of a job's keys."""
    return {job(job_id): "hash", events(job_id): "stream", checkpoints(job_id): "hash"}


def job(job_id: str) -> str:
    return JOB + job_id


def events(job_id: str) -> str:
    return JOB + job_id + EVENTS


def checkpoints(job_id: str) -> str:
    return JOB + job_id + CHECKPOINTS


CALL_TTL_S = 900
"""Seconds that a script's answer is kept for retries of the same call: longer than a caller retries
(connection.py)."""

FOLDER = Path(__file__).with_name("lua")
SCRIPTS = frozenset(file.stem for file in FOLDER.glob("*.lua")) - {"shared"}


def source(name: str) -> str:
    """Returns the text of the script, with the keys by the same names, and the building blocks
    before it."""
    texts = {name: value for name, value in globals().items() if isinstance(value, str)}
    names = [f"local {name} = '{value}'" for name, value in texts.items() if name.isupper()]
    names.append(f"local MAX_PLACES = {MAX_PLACES}")
    files = [(FOLDER / f"{each}.lua").read_text() for each in ("shared", name)]
    return "\n".join([*names, f"local CALL_TTL_S = {CALL_TTL_S}", *files])
