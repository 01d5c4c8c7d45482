"""mlp-prefetch: bring MLP weights into the device's cache behind the vector operators.

In decode, a dense layer's large matmuls wait for their weights to arrive from HBM, while the
memory bus idles during the small vector operators before them. So ask for a weight early:

    attention -> [gate_up weight] -> RMSNorm -> gate_up matmul -> [down weight] -> SwiGLU -> down

The idea is vllm-ascend #2816; that feature is gone from vllm-ascend since 0.24.0rc1. Here both
places are reached through the layer's own modules, so there is nothing to count, no name to
parse, and no forward context to ask.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ascend_opt import (
    ByteSize,
    DenseQwen,
    EngineCondition,
    MaxNumTokens,
    Pass,
    Requires,
    hookimpl,
    traced_patch,
)
from ascend_opt.devices import BACKENDS

logger = logging.getLogger("vllm.ascend_opt")

MIB = 1 << 20


@dataclass(frozen=True)
class MlpPrefetchParameters:
    """Parameters of mlp-prefetch.

    Attributes:
        backend: `npu`, or `record` to count on any device without prefetching.
        where: `graph` (only while a graph is being captured), `eager` (only outside) or `both`.
            Left out: what suits the backend, `graph` for npu and `both` for record.
        max_num_tokens: Prefetch only for fewer tokens than this: a larger batch is bound by
            computing, and leaves the bus no room.
        gate_up_bytes: Most of a gate_up weight that is prefetched; 0 leaves it alone.
        down_bytes: Most of a down weight that is prefetched; 0 leaves it alone.
    """

    backend: Literal["npu", "record"] = "npu"
    where: Literal["graph", "eager", "both"] | None = None
    max_num_tokens: int = 500
    gate_up_bytes: ByteSize = 18 * MIB
    down_bytes: ByteSize = 18 * MIB

    def __post_init__(self) -> None:
        if self.max_num_tokens < 1:
            raise ValueError(f"max_num_tokens={self.max_num_tokens}, expected at least 1")
        if self.where is None:
            object.__setattr__(self, "where", BACKENDS[self.backend].default_where)


class NativePrefetchOff(EngineCondition):
    """vllm-ascend does not prefetch the same weights itself.

    Two features that prefetch one weight cost 4.9 to 7.6% (vllm-ascend #6629).
    """

    name = "native-prefetch-off"
    description = "vllm-ascend's own weight prefetch is off (releases up to 0.23.0 have one)"

    _VARIABLE = "VLLM_ASCEND_ENABLE_PREFETCH_MLP"  # before weight_prefetch_config

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        if os.environ.get(self._VARIABLE, "0") not in ("", "0"):
            return f"vllm-ascend's own prefetch is on ({self._VARIABLE}=1)"
        additional = getattr(subject, "additional_config", None)
        native = additional.get("weight_prefetch_config") if isinstance(additional, dict) else None
        if isinstance(native, dict) and native.get("enabled") and self._has_native():
            return "vllm-ascend's own prefetch is on (weight_prefetch_config.enabled)"
        return None

    @staticmethod
    def _has_native() -> bool:
        # Later releases ignore the setting. In a worker the parent packages are imported already.
        try:
            return importlib.util.find_spec("vllm_ascend.ops.weight_prefetch") is not None
        except ImportError:
            return False


class GraphsWherePrefetched(EngineCondition):
    """With `where=graph`, the engine captures graphs."""

    name = "graphs-where-prefetched"
    description = "the engine captures graphs, or where is not graph"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        if parameters.where != "graph":
            return None
        mode = getattr(getattr(subject, "compilation_config", None), "cudagraph_mode", None)
        eager = getattr(getattr(subject, "model_config", None), "enforce_eager", False)
        if eager or getattr(mode, "name", None) == "NONE":
            found = "enforce_eager" if eager else "cudagraph_mode=NONE"
            return (
                f"where=graph, but the engine captures no graph ({found}); where=eager or both "
                "prefetches outside graphs too, where each call waits for the task queue"
            )
        return None


class NoAllReducePattern(EngineCondition):
    """No compiler pass matches the attention's all-reduce together with the RMSNorm behind it.

    Our op is one more user of the tensor between the two, and no pattern matches across one.
    Sequence parallelism would then be applied to some norms of a model and not to others.
    """

    name = "no-all-reduce-pattern"
    description = "no compiler pass fuses the attention's all-reduce with RMSNorm (TP > 1)"

    _SWITCHES = ("enable_sp", "fuse_allreduce_rms", "fuse_gemm_comms")
    _OLDER = ("enable_sequence_parallelism", "enable_fi_allreduce_fusion", "enable_async_tp")

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        ranks = getattr(getattr(subject, "parallel_config", None), "tensor_parallel_size", 1)
        if ranks == 1 or parameters.gate_up_bytes == 0:
            return None
        config = getattr(getattr(subject, "compilation_config", None), "pass_config", None)
        on = [s for s in (*self._SWITCHES, *self._OLDER) if getattr(config, s, False) is True]
        if not on:
            return None
        return (
            f"pass_config.{on[0]} with tensor_parallel_size={ranks} needs the attention's output "
            "for itself; gate_up_bytes=0 prefetches the down weight alone"
        )


class MlpPrefetch(Pass):
    """Prefetch each dense MLP's weights into cache behind RMSNorm and SwiGLU."""

    name = "mlp-prefetch"
    origin = "vllm-ascend #2816"
    remove_when = "the installed vllm-ascend prefetches dense MLP weights again, with a switch"
    Parameters = MlpPrefetchParameters
    changes_graph = True
    effect = "prefetches"
    conditions = (
        Requires("vllm>=0.18"),
        DenseQwen(),
        NativePrefetchOff(),
        GraphsWherePrefetched(),
        NoAllReducePattern(),
        MaxNumTokens(),
    )

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._backend = BACKENDS[self.parameters.backend]()
        self._prepared = False
        self._first: int | None = None  # the weight that begins a forward pass
        self._captured: dict[int, bool] = {}  # size of a captured graph, and what was decided

    def unmet(self) -> str | None:
        """See `Pass.unmet`."""
        if not self.parameters.gate_up_bytes and not self.parameters.down_bytes:
            return "gate_up_bytes and down_bytes are both 0: there is nothing to prefetch"
        return BACKENDS[self.parameters.backend].unmet()

    def applied(self) -> str:
        """See `Pass.applied`."""
        p = self.parameters
        places = {"graph": "in captured graphs", "eager": "outside graphs", "both": "everywhere"}
        once = "" if p.where == "eager" else ", decided once for each captured size"
        verb = "counts" if p.backend == "record" else "prefetches"
        return (
            f"{verb} gate_up ({p.gate_up_bytes / MIB:g} MiB) and down ({p.down_bytes / MIB:g} MiB) "
            f"weights {places[p.where]} below {p.max_num_tokens} tokens{once}"
        )

    def reverted(self) -> None:
        """See `Pass.reverted`."""
        _Op.clear(self)
        self._backend.close()

    @traced_patch(
        "vllm.model_executor.models.qwen2:Qwen2MLP.forward",
        known={"79af4e168137a95c": "0.18"},
    )
    def mlp_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Prefetch the down weight as soon as gate_up is there."""
        hint = self._hint(self.parameters.down_bytes)

        @functools.wraps(original)
        def forward(self: Any, x: Any) -> Any:
            gate_up, _ = self.gate_up_proj(x)
            hint(gate_up, self.down_proj)
            x = self.act_fn(gate_up)
            x, _ = self.down_proj(x)
            return x

        return forward

    @traced_patch(
        "vllm.model_executor.models.qwen2:Qwen2DecoderLayer.forward",
        known={"22a5025770769c87": "0.18"},
    )
    def qwen2_layer_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Prefetch the gate_up weight as soon as the attention's output is there."""
        return self._layer_forward(original)

    @traced_patch(
        "vllm.model_executor.models.qwen3:Qwen3DecoderLayer.forward",
        known={"22a5025770769c87": "0.18"},
    )
    def qwen3_layer_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Prefetch the gate_up weight as soon as the attention's output is there."""
        return self._layer_forward(original)

    def _layer_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # The layer owns attention and MLP. Patching the attention instead would lose to
        # vllm-ascend's patch_qwen3vl, which replaces its forward when the worker starts.
        hint = self._hint(self.parameters.gate_up_bytes)

        @functools.wraps(original)
        def forward(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
            if residual is None:
                residual = hidden_states
                hidden_states = self.input_layernorm(hidden_states)
            else:
                hidden_states, residual = self.input_layernorm(hidden_states, residual)
            hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
            hint(hidden_states, getattr(self.mlp, "gate_up_proj", None))
            hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
            return hidden_states, residual

        return forward

    def _hint(self, max_bytes: int) -> Callable[[Any, Any], None]:
        """Return the traced function `hint(trigger, projection)`; it only calls the op."""
        import torch

        _Op.serve(self)
        op = torch.ops.ascend_opt.prefetch.default
        max_num_tokens = self.parameters.max_num_tokens

        def hint(trigger: Any, projection: Any) -> None:
            if max_bytes == 0:
                return
            # Read now: quantisation and layout casts replace the weight after loading.
            weight: Any = getattr(projection, "weight", None)
            # A wrapper around tensors is asked of its type: tracing sees through the object.
            wraps = hasattr(type(weight), "__tensor_flatten__")
            if not isinstance(weight, torch.Tensor) or weight.is_meta or wraps:
                op(trigger, None, max_bytes, max_num_tokens)
                return
            rows = getattr(projection, "output_size_per_partition", None)
            columns = getattr(projection, "input_size_per_partition", None)
            limit = max_bytes
            if rows is not None and columns is not None:
                limit = min(limit, rows * columns * weight.element_size())
            op(trigger, weight, limit, max_num_tokens)

        return hint

    def prefetch(self, trigger: Any, weight: Any, max_bytes: int, max_num_tokens: int) -> None:
        """Decide about one weight, at run time; called by the op, and never raises.

        Args:
            trigger: Tensor of shape [num_tokens, …] (padded under a captured graph) that is
                ready when the prefetch may begin.
            weight: The weight, or None where the layer has no plain tensor.
            max_bytes: Most that is prefetched.
            max_num_tokens: Exclusive limit on `num_tokens`.
        """
        if self.failure is not None:
            return
        try:
            self._prefetch(trigger, weight, max_bytes, max_num_tokens)
        except Exception as error:
            self.fail(f"prefetch: {type(error).__name__}: {error}")
            logger.exception("ascend_opt: mlp-prefetch failed and is now off in this process")

    def _prefetch(self, trigger: Any, weight: Any, max_bytes: int, max_num_tokens: int) -> None:
        counters = self.counters
        counters["calls"] += 1
        num_tokens = trigger.shape[0]
        held = num_tokens < max_num_tokens
        self._count_step(weight, held)

        where = self.parameters.where
        capturing = self._backend.capturing()
        if capturing:
            self._count_capture(num_tokens, held)
        elif not self._prepared:
            self._backend.prepare()
            self._prepared = True
        if not held:
            counters["too_many_tokens"] += 1
            return
        if where != "both" and capturing != (where == "graph"):
            counters["inside_graph" if capturing else "outside_graph"] += 1
            return
        reason = self._backend.refusal(weight, trigger)
        if reason is not None:
            self._skip(reason)
            return
        counters["bytes_prefetched"] += self._backend.prefetch(weight, trigger, max_bytes)
        counters["prefetches"] += 1

    def _count_step(self, weight: Any, held: bool) -> None:
        # An op cannot see an engine step. It sees the first weight come round again.
        if weight is None:
            return
        key = weight.data_ptr() or id(weight)
        if self._first is None:
            self._first = key
        if key == self._first:
            self.counters["steps"] += 1
            self.counters["held"] += held

    def _count_capture(self, num_tokens: int, held: bool) -> None:
        if num_tokens not in self._captured:
            self._captured[num_tokens] = held
            self.counters["captured_sizes"] += 1
            self.counters["captured_sizes_held"] += held

    def _skip(self, reason: str) -> None:
        key = f"skipped: {reason}"
        if key not in self.counters:
            logger.warning("ascend_opt: mlp-prefetch skips a weight: %s", reason)
        self.counters[key] += 1


class _Op:
    """`ascend_opt::prefetch`, defined once in a process, and the pass that answers it.

    A compiled model keeps the op after the pass is disabled: then nobody answers.
    """

    library: Any = None
    answering: MlpPrefetch | None = None

    @classmethod
    def serve(cls, instance: MlpPrefetch) -> None:
        cls.answering = instance
        if cls.library is None:
            cls.library = _define()

    @classmethod
    def clear(cls, instance: MlpPrefetch) -> None:
        if cls.answering is instance:
            cls.answering = None


def _define() -> Any:
    import torch

    # Library.define is dispatched in 4 us, torch.library.custom_op in 29.
    library = torch.library.Library("ascend_opt", "FRAGMENT")
    library.define(
        "prefetch(Tensor trigger, Tensor? weight, int max_bytes, int max_num_tokens) -> ()"
    )

    def run(trigger: Any, weight: Any, max_bytes: int, max_num_tokens: int) -> None:
        if _Op.answering is not None:
            _Op.answering.prefetch(trigger, weight, max_bytes, max_num_tokens)

    def trace(trigger: Any, weight: Any, max_bytes: int, max_num_tokens: int) -> None:
        return None

    library.impl("prefetch", run, "CompositeExplicitAutograd")
    torch.library.register_fake("ascend_opt::prefetch", trace, lib=library)
    # It returns nothing and mutates nothing: without this, compilers delete it.
    torch.fx.node.has_side_effect(torch.ops.ascend_opt.prefetch.default)
    return library


@hookimpl
def ascend_opt_passes() -> list[type[Pass]]:
    """Register the pass."""
    return [MlpPrefetch]
