"""Every body that crosses between processes. READ with services/orchestrator/loop/pipeline.py.

    Job -> Prompt -> RolloutGroup -> Score -> (advantages) -> Example -> StepResult -> WeightsRef

| file | bodies |
|---|---|
| `base.py` | base class; fences; bodies of every service |
| `rollouts.py` | prompts, `POST /generate`, rollouts |
| `sessions.py` | recorded conversations of agents |
| `rewards.py` | `POST /score`, verdicts and scores |
| `graders.py` | `/graders` and `POST /execute` |
| `training.py` | batches, examples, the trainer's job, steps and checkpoints |
| `weights.py` | published versions, one class per sync method |
| `samplers.py` | what a sampler serves, and its registration |
| `jobs.py` | the jobs API: lists, events, metrics |
| `pages.py` | how many entries an answer has at most |
| `records.py` | the jobs API: submissions, records, stored rollouts |
| `planning.py` | what a job will probably need |
| `evaluations.py` | models compared on held-out problems |
| `files.py` | files that were uploaded |
| `keys.py` | API keys |
| `calling.py` | completions that are passed on to a sampler |
| `fine_tuning.py` | the jobs API in OpenAI's shape |
| `examples/` | one of each body, for the OpenAPI documents |

All are imported from here. All are frozen and refuse unknown keys. Token ids, log-probs and masks
stay bytes from end to end (`packed.py`): in JSON a list of numbers, in msgpack 4, 4 and 1 bytes per
token. The job's own sections are in `shared/job/`. What is stored is read tolerantly, see
`codec.decode_stored`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.lazily import exporting

# Exports the names under TYPE_CHECKING; each is imported at its first use (lazily.py).
# ruff: noqa: F401
# pyright: reportUnusedImport=false

if TYPE_CHECKING:
    from shared.wire.base import (
        WAIT_PATH,
        Dependency,
        Fence,
        Fenced,
        Fencing,
        Health,
        JobId,
        Message,
        NoBody,
        Orchestrator,
        Readiness,
        VersionInfo,
        WaitRequest,
        WaitResult,
        Wire,
    )
    from shared.wire.calling import CallAnswer, CallRequest, ServedModel, ServedModelList
    from shared.wire.evaluations import (
        Estimate,
        EvaluatedModel,
        EvaluationEnded,
        EvaluationReport,
        EvaluationRequest,
        EvaluationState,
        ModelScores,
        SetReport,
    )
    from shared.wire.files import FileDeleted, FileList, Purpose, UploadedFile
    from shared.wire.fine_tuning import (
        CreateFineTuningJob,
        FineTuningCheckpoint,
        FineTuningCheckpointList,
        FineTuningError,
        FineTuningEvent,
        FineTuningEventList,
        FineTuningJob,
        FineTuningJobList,
        ValidatedGrader,
        ValidateGraderRequest,
    )
    from shared.wire.graders import (
        ExecuteRequest,
        Execution,
        GraderErrors,
        GraderInfo,
        GraderList,
        GraderRun,
        GraderRunMetadata,
        GraderRunRequest,
        Tried,
        TriedReward,
        TryRequest,
        Validated,
        ValidateRequest,
    )
    from shared.wire.jobs import (
        TERMINAL,
        Event,
        EventList,
        JobDeleted,
        JobList,
        JobProgress,
        JobState,
        JobStatus,
        JobSummary,
        MetricsList,
        MetricsRow,
        Obstacle,
        Recovered,
        RecoveredJob,
        ResumeRequest,
        Withdrawn,
        WithdrawRequest,
    )
    from shared.wire.keys import Access, ApiKey, CreatedKey, CreateKey, KeyList, KeyRevoked
    from shared.wire.planning import (
        Change,
        Cost,
        Placement,
        Plan,
        SamplerMemory,
        StepTime,
        TrainerMemory,
    )
    from shared.wire.records import (
        DryRun,
        GradedRollout,
        JobRecord,
        PreviewedPrompt,
        RegradedRollout,
        RegradedStep,
        RegradeReport,
        RegradeRequest,
        RolloutList,
        SubmitRequest,
    )
    from shared.wire.rewards import (
        MAX_CHECKED_PROMPTS,
        MAX_COLUMNS,
        MAX_PARTS,
        MAX_REWARDS,
        MAX_SCORED_ITEMS,
        Part,
        Score,
        ScoredGroup,
        ScoredItem,
        ScoreItem,
        ScoreRequest,
        ScoreResult,
        Verdict,
    )
    from shared.wire.rollouts import (
        Aborted,
        AbortRequest,
        FinishReason,
        GenerateRequest,
        Prompt,
        Rollout,
        RolloutGroup,
        Sampling,
        Span,
    )
    from shared.wire.samplers import (
        CheckedWeights,
        EngineSpec,
        ModelRequest,
        PauseState,
        RegisteredSampler,
        Registration,
        SamplerList,
        ServingWeights,
        SleepRequest,
        Unregistered,
    )
    from shared.wire.sessions import (
        ChatRequest,
        Conversation,
        SessionDeleted,
        SessionRecord,
        Turn,
    )
    from shared.wire.training import (
        Batch,
        Checkpoint,
        CheckpointFile,
        CheckpointFiles,
        CheckpointList,
        CheckpointRequest,
        Example,
        Released,
        ReleaseRequest,
        StepResult,
        StepTotals,
        TrainerJob,
        TrainerState,
        TrainStepRequest,
    )
    from shared.wire.weights import (
        AdapterWeights,
        AnyWeights,
        BroadcastWeights,
        Canary,
        DeltaStep,
        DeltaWeights,
        FolderWeights,
        HttpWeights,
        Published,
        PublishRequest,
        SentTensor,
        SentWeights,
        SharedTensor,
        SharedWeights,
        WeightFile,
        WeightsRef,
    )
else:
    __getattr__, __dir__ = exporting(__file__, globals())
