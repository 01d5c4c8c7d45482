"""What vLLM mixes into its worker class for a benchmark; there is room for one class only."""

from __future__ import annotations

from ascend_opt.proof.timing import WorkerTimer
from ascend_opt.proof.tracing import WorkerTracer

EXTENSION = "ascend_opt.proof.worker.WorkerExtension"
"""The value of `--worker-extension-cls`."""


class WorkerExtension(WorkerTimer, WorkerTracer):
    """Times and traces the host methods that passes patch."""
