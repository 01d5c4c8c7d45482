import subprocess
import sys
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ascend_opt.devices import BACKENDS, RecordBackend  # noqa: E402
from ascend_opt.errors import ParameterError  # noqa: E402
from ascend_opt.parameters import resolve  # noqa: E402
from ascend_opt_passes.mlp_prefetch import (  # noqa: E402
    GraphsWherePrefetched,
    MlpPrefetch,
    NativePrefetchOff,
    NoAllReducePattern,
)

HIDDEN, INTERMEDIATE = 8, 12
GATE_UP_BYTES = 2 * INTERMEDIATE * HIDDEN * 4
DOWN_BYTES = INTERMEDIATE * HIDDEN * 4


class Projection(torch.nn.Module):
    """A linear layer with the attributes of vLLM's."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        values = torch.randn(rows, columns) / columns**0.5
        self.weight: Any = torch.nn.Parameter(values, requires_grad=False)
        self.output_size_per_partition = rows
        self.input_size_per_partition = columns

    def forward(self, x: Any) -> tuple[Any, None]:
        return x @ self.weight.t(), None


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Projection(2 * INTERMEDIATE, HIDDEN)
        self.down_proj = Projection(HIDDEN, INTERMEDIATE)

    def act_fn(self, x: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Norm(torch.nn.Module):
    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is None:
            return x * 0.5
        return (x + residual) * 0.5, x + residual


class Attention(torch.nn.Module):
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        return hidden_states * 2 + positions[:, None]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Model(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, x: Any) -> Any:
        positions = torch.arange(x.shape[0], dtype=x.dtype)
        residual = None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return x + residual


class Spy(RecordBackend):
    """Keeps what it was asked for."""

    capture = False
    log: list[Any]

    def prepare(self) -> None:
        self.log.append("prepare")

    def capturing(self) -> bool:
        return Spy.capture

    def prefetch(self, weight: Any, trigger: Any, max_bytes: int) -> int:
        size = super().prefetch(weight, trigger, max_bytes)
        self.log.append((weight, trigger.clone(), size))
        return size


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the backend was asked for, in order."""
    monkeypatch.setitem(BACKENDS, "record", Spy)
    monkeypatch.setattr(Spy, "log", [], raising=False)
    monkeypatch.setattr(Spy, "capture", False)
    return Spy.log


@pytest.fixture
def patch(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a pass in place on the light modules, as the framework does on vLLM's."""
    instances = []

    def apply(**parameters: Any) -> MlpPrefetch:
        given = resolve("mlp-prefetch", MlpPrefetch.Parameters, {"backend": "record"} | parameters)
        instance = MlpPrefetch(given)
        instances.append(instance)
        mlp, layer = vars(Mlp)["forward"], vars(Layer)["forward"]
        monkeypatch.setattr(Mlp, "forward", instance.mlp_forward(mlp))
        monkeypatch.setattr(Layer, "forward", instance.qwen3_layer_forward(layer))
        return instance

    # A cached artifact would hide that the op is deleted while compiling.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield apply
    for instance in instances:
        instance.reverted()
    torch._dynamo.reset()


def prefetched(log: list[Any]) -> list[Any]:
    return [entry for entry in log if entry != "prepare"]


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=True, backend="inductor")


def test_each_weight_is_prefetched_once_when_its_trigger_is_ready(log, patch):
    """gate_up's weight goes with the attention's output, down's with gate_up's; nothing twice."""
    model = Model()
    x = torch.randn(3, HIDDEN)
    triggers = []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda m, a, out: triggers.append(out))
        layer.mlp.gate_up_proj.register_forward_hook(lambda m, a, out: triggers.append(out[0]))
    patch()
    model(x)

    weights = [p.weight for la in model.layers for p in (la.mlp.gate_up_proj, la.mlp.down_proj)]
    found = prefetched(log)
    assert [id(weight) for weight, _, _ in found] == [id(weight) for weight in weights]
    assert all(torch.equal(trigger, t) for (_, trigger, _), t in zip(found, triggers, strict=True))
    assert [size for _, _, size in found] == [GATE_UP_BYTES, DOWN_BYTES] * 2


@pytest.mark.parametrize("run", [lambda model: model, compiled], ids=["eager", "compiled"])
def test_values_do_not_change(run, log, patch):
    """The patched model computes what the unpatched one does."""
    model, x = Model(), torch.randn(3, HIDDEN)
    expected = run(model)(x)
    patch()
    torch.testing.assert_close(run(model)(x), expected)
    assert len(prefetched(log)) == 4


def test_the_compiled_model_decides_at_run_time(log, patch):
    """One graph serves 499 and 500 tokens: only the first prefetches, whichever came first."""
    instance = patch()
    model = compiled(Model())
    counts = []
    for num_tokens in (500, 499, 500, 600, 2):
        log.clear()
        model(torch.randn(num_tokens, HIDDEN))
        counts.append(len(prefetched(log)))

    assert counts == [0, 4, 0, 0, 4]
    assert instance.counters["steps"] == 5
    assert instance.counters["held"] == 2
    assert instance.counters["too_many_tokens"] == 12


def test_steps_are_counted_by_the_first_weight(log, patch):
    """A step is one time round the weights, however many there are; each call is counted."""
    instance = patch(max_num_tokens=4)
    model = Model()
    for num_tokens in (3, 5, 2):
        model(torch.randn(num_tokens, HIDDEN))
    found = {name: instance.counters[name] for name in ("steps", "held", "calls", "prefetches")}
    assert found == {"steps": 3, "held": 2, "calls": 12, "prefetches": 8}
    assert instance.counters["too_many_tokens"] == 4


def test_a_weight_is_known_by_its_storage(log):
    """Also where each call gets a tensor object of its own, and where the storage is empty."""
    instance = MlpPrefetch(MlpPrefetch.Parameters(backend="record"))
    trigger, weight = torch.zeros(1, 1), torch.zeros(2, 2)
    views = [weight.detach() for _ in range(3)]
    for view in views:
        instance.prefetch(trigger, view, 8, 500)
    assert instance.counters["steps"] == 3

    instance = MlpPrefetch(MlpPrefetch.Parameters(backend="record"))
    for emptied in (torch.empty(0), torch.empty(0)) * 2:
        instance.prefetch(trigger, emptied, 8, 500)
    assert instance.counters["steps"] == 2


@pytest.mark.parametrize(
    ("parameters", "sizes"),
    [
        ({"gate_up_bytes": 0}, [DOWN_BYTES]),
        ({"down_bytes": "0B"}, [GATE_UP_BYTES]),
        ({"gate_up_bytes": 100, "down_bytes": 200}, [100, 200]),
    ],
)
def test_sizes_limit_what_is_prefetched(parameters, sizes, log, patch):
    """A weight is prefetched up to its limit, and not at all with a limit of 0."""
    patch(**parameters)
    Model(layers=1)(torch.randn(3, HIDDEN))
    assert [size for _, _, size in prefetched(log)] == sizes


@pytest.mark.parametrize(
    ("where", "capture", "expected", "counter"),
    [
        ("graph", False, 0, "outside_graph"),
        ("graph", True, 2, "prefetches"),
        ("eager", False, 2, "prefetches"),
        ("eager", True, 0, "inside_graph"),
        ("both", False, 2, "prefetches"),
        ("both", True, 2, "prefetches"),
    ],
)
def test_where_decides_between_capture_and_eager(where, capture, expected, counter, log, patch):
    """`where` is asked of the stream at each call, and what it held back is counted."""
    instance = patch(where=where)
    model = Model(layers=1)
    Spy.capture = capture
    model(torch.randn(3, HIDDEN))
    assert len(prefetched(log)) == expected
    assert instance.counters[counter] == 2


def test_a_capture_never_prepares(log, patch):
    """What allocates happens in the first pass outside a capture, once, whatever `where` says."""
    patch(where="graph")
    model, x = Model(layers=1), torch.randn(3, HIDDEN)
    Spy.capture = True
    model(x)
    assert "prepare" not in log
    Spy.capture = False
    model(x)
    model(x)
    assert log.count("prepare") == 1


def test_captured_sizes_are_counted_once(log, patch):
    """Each captured size was decided once: the counters say how many, and for how many it held."""
    instance = patch(where="graph", max_num_tokens=8)
    model = Model()
    Spy.capture = True
    for num_tokens in (16, 8, 4, 2, 4):
        model(torch.randn(num_tokens, HIDDEN))
    assert instance.counters["captured_sizes"] == 4
    assert instance.counters["captured_sizes_held"] == 2


def missing(projection: Projection) -> None:
    del projection.weight
    projection.forward = lambda x: (x.repeat(1, 3), None)


def on_meta(projection: Projection) -> None:
    weight = projection.weight.to("meta")
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)
    projection.forward = lambda x: (x.repeat(1, 3), None)


def wrapped(projection: Projection) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight = projection.weight.detach()
    projection.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    projection.forward = lambda x: (x.repeat(1, 3), None)


@pytest.mark.parametrize("run", [lambda model: model, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("spoil", [missing, on_meta, wrapped])
def test_a_weight_that_is_no_plain_tensor_is_skipped(spoil, run, log, patch, caplog):
    """It is counted under its reason and logged once; every other weight is prefetched."""
    reason = "no plain weight tensor"
    instance = patch()
    model = Model()
    spoil(model.layers[1].mlp.gate_up_proj)
    model = run(model)
    for _ in range(3):
        model(torch.randn(3, HIDDEN))

    assert instance.failure is None
    assert len(prefetched(log)) == 9
    assert instance.counters[f"skipped: {reason}"] == 3
    assert [record.message for record in caplog.records].count(
        f"ascend_opt: mlp-prefetch skips a weight: {reason}"
    ) == 1


def test_an_emptied_weight_counts_with_its_size(log, patch):
    """The CPU platform re-packs a weight and leaves an empty one: `record` counts the real size."""
    patch()
    model = Model(layers=1)
    down = model.layers[0].mlp.down_proj
    packed = down.weight
    down.forward = lambda x: (x @ packed.t(), None)
    down.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    model(torch.randn(3, HIDDEN))
    assert [size for _, _, size in prefetched(log)] == [GATE_UP_BYTES, DOWN_BYTES]


@pytest.mark.parametrize("missing", ["output_size_per_partition", "input_size_per_partition"])
def test_a_layer_that_does_not_know_its_size_is_prefetched(missing, log, patch):
    """Then the weight itself says how large it is."""
    patch()
    model = Model(layers=1)
    delattr(model.layers[0].mlp.down_proj, missing)
    model(torch.randn(3, HIDDEN))
    assert [size for _, _, size in prefetched(log)] == [GATE_UP_BYTES, DOWN_BYTES]


def test_an_error_in_the_backend_switches_the_pass_off(log, patch, caplog, monkeypatch):
    """The forward pass goes on with the right values; one log entry; nothing is tried again."""
    model, x = Model(), torch.randn(3, HIDDEN)
    expected = model(x)
    instance = patch()
    attempts = []

    def broken(*args: Any) -> int:
        attempts.append(args)
        raise RuntimeError("no such stream")

    monkeypatch.setattr(Spy, "prefetch", broken)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)

    assert instance.failure == "prefetch: RuntimeError: no such stream"
    assert len(attempts) == 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_a_compiled_model_is_inert_while_the_pass_is_off(log, patch):
    """The op stays in the compiled model: it does nothing when off, and works when on again."""
    first = patch()
    model, x = compiled(Model()), torch.randn(3, HIDDEN)
    expected = model(x)
    assert len(prefetched(log)) == 4

    first.reverted()
    log.clear()
    torch.testing.assert_close(model(x), expected)
    assert log == []

    second = patch()
    model(x)
    assert second.counters["prefetches"] == 4
    assert first.counters["prefetches"] == 4


def test_withdrawing_an_old_instance_leaves_the_new_one_on(log, patch):
    """New parameters are in place before the old instance is released: only the old goes."""
    old = patch()
    new = patch(max_num_tokens=7)
    old.reverted()
    Model()(torch.randn(3, HIDDEN))
    assert new.counters["prefetches"] == 4


def test_off_leaves_no_op_in_the_graph(log, patch):
    """The traced graph of a patched layer has two calls of the op, an unpatched one has none.

    So the pass changes what is compiled, and has to say so: it enters the compile cache's key.
    """

    def calls_in_graph() -> int:
        found = []

        def backend(graph: Any, inputs: Any) -> Any:
            found.extend(n for n in graph.graph.nodes if "ascend_opt" in str(n.target))
            return graph.forward

        torch._dynamo.reset()
        torch.compile(Model(layers=1), backend=backend, fullgraph=True)(torch.randn(3, HIDDEN))
        return len(found)

    assert calls_in_graph() == 0
    patch()
    assert calls_in_graph() == 2
    assert MlpPrefetch.changes_graph


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "cuda"}, "backend"),
        ({"where": "graphs"}, "where"),
        ({"max_num_tokens": 0}, "max_num_tokens=0, expected at least 1"),
        ({"max_num_tokens": "many"}, "max_num_tokens"),
        ({"gate_up_bytes": "18XB"}, "18XB"),
        ({"down_bytes": -1}, "negative"),
    ],
)
def test_wrong_parameters_are_named(given, message):
    """A wrong value is refused with its name and what was expected."""
    with pytest.raises(ParameterError, match=message):
        resolve("mlp-prefetch", MlpPrefetch.Parameters, given)


def test_where_follows_the_backend():
    """Left out, `where` is what suits the backend; given, it is kept."""
    where = [
        resolve("mlp-prefetch", MlpPrefetch.Parameters, given).where
        for given in ({}, {"backend": "record"}, {"backend": "record", "where": "graph"})
    ]
    assert where == ["graph", "both", "graph"]


@pytest.mark.parametrize(
    ("gate_up", "down", "refused"), [(0, 0, True), (1, 0, False), (0, 1, False)]
)
def test_nothing_to_prefetch_is_refused(gate_up, down, refused):
    """With both sizes 0 the pass says that it has nothing to do; with one it has."""
    parameters = MlpPrefetch.Parameters("record", gate_up_bytes=gate_up, down_bytes=down)
    assert ("both 0" in (MlpPrefetch(parameters).unmet() or "")) == refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {},
            (
                "prefetches gate_up (18 MiB) and down (18 MiB) weights in captured graphs below "
                "500 tokens, decided once for each captured size"
            ),
        ),
        (
            {"backend": "record", "gate_up_bytes": "1.5MiB", "down_bytes": 0},
            (
                "counts gate_up (1.5 MiB) and down (0 MiB) weights everywhere below 500 tokens, "
                "decided once for each captured size"
            ),
        ),
        (
            {"where": "eager", "max_num_tokens": 1, "down_bytes": 512 * 1024},
            "prefetches gate_up (18 MiB) and down (0.5 MiB) weights outside graphs below 1 tokens",
        ),
    ],
)
def test_the_status_says_what_is_prefetched(given, said):
    """Sizes, place and limit, defaults included; outside graphs nothing is decided for good."""
    assert MlpPrefetch(resolve("mlp-prefetch", MlpPrefetch.Parameters, given)).applied() == said


def test_sizes_are_bytes():
    """The default is upstream's 18 MiB for each weight."""
    parameters = MlpPrefetch.Parameters()
    assert (parameters.gate_up_bytes, parameters.down_bytes) == (18 * 1024**2, 18 * 1024**2)


def test_npu_without_torch_npu_is_refused(monkeypatch):
    """The default backend names the missing package and the way to try the gates without it."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    reason = MlpPrefetch().unmet() or ""
    assert "torch_npu is not installed" in reason
    assert "backend=record" in reason


def engine(**parts: Any) -> Namespace:
    return Namespace(**parts)


@pytest.mark.parametrize(
    ("additional", "native", "variable", "on"),
    [
        ({"weight_prefetch_config": {"enabled": True}}, True, None, True),
        ({"weight_prefetch_config": {"enabled": True}}, False, None, False),
        ({"weight_prefetch_config": {"enabled": False}}, True, None, False),
        ({"weight_prefetch_config": {}}, True, None, False),
        ({}, True, None, False),
        (None, True, None, False),
        (None, False, "1", True),
        (None, False, "0", False),
    ],
)
def test_steps_aside_for_the_native_feature(additional, native, variable, on, monkeypatch):
    """Refused where vllm-ascend prefetches itself; a setting that the release ignores is none."""
    name = "VLLM_ASCEND_ENABLE_PREFETCH_MLP"
    monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(name, variable)
    for package in ("vllm_ascend", "vllm_ascend.ops"):
        monkeypatch.setitem(sys.modules, package, Namespace(__path__=[], __spec__=None))
    module = Namespace(__spec__="present") if native else None
    monkeypatch.setitem(sys.modules, "vllm_ascend.ops.weight_prefetch", module)

    reason = NativePrefetchOff().unmet(engine(additional_config=additional), None)
    assert (reason is not None) == on


def test_a_setting_without_vllm_ascend_is_none(monkeypatch):
    """On a CPU or a GPU nobody reads it."""
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_PREFETCH_MLP", raising=False)
    monkeypatch.setitem(sys.modules, "vllm_ascend", None)
    config = engine(additional_config={"weight_prefetch_config": {"enabled": True}})
    assert NativePrefetchOff().unmet(config, None) is None


@pytest.mark.parametrize(
    ("where", "eager", "mode", "refused"),
    [
        ("graph", True, "FULL", "enforce_eager"),
        ("graph", False, "NONE", "cudagraph_mode=NONE"),
        ("graph", False, "FULL_DECODE_ONLY", None),
        ("graph", False, "PIECEWISE", None),
        ("both", True, "NONE", None),
        ("eager", True, "NONE", None),
    ],
)
def test_graph_only_needs_an_engine_that_captures(where, eager, mode, refused):
    """With where=graph an engine without graphs would never prefetch: refused, and told why."""
    config = engine(
        model_config=Namespace(enforce_eager=eager),
        compilation_config=Namespace(cudagraph_mode=Namespace(name=mode)),
    )
    reason = GraphsWherePrefetched().unmet(config, Namespace(where=where))
    assert (reason is None) if refused is None else (refused in (reason or ""))


def test_an_engine_that_does_not_say_is_not_refused():
    """What a configuration lacks is no reason: nor graphs, nor ranks, nor compiler passes."""
    passes = engine(compilation_config=Namespace(pass_config=Namespace(enable_sp=True)))
    for config in (engine(), passes):
        assert GraphsWherePrefetched().unmet(config, Namespace(where="graph")) is None
        assert NoAllReducePattern().unmet(config, Namespace(gate_up_bytes=1)) is None
    ranks = engine(parallel_config=Namespace(tensor_parallel_size=2))
    assert NoAllReducePattern().unmet(ranks, Namespace(gate_up_bytes=1)) is None


@pytest.mark.parametrize(
    ("ranks", "switches", "gate_up_bytes", "refused"),
    [
        (2, {"enable_sp": True}, 1, "pass_config.enable_sp"),
        (2, {"fuse_allreduce_rms": True}, 1, "pass_config.fuse_allreduce_rms"),
        (2, {"enable_sequence_parallelism": True}, 1, "pass_config.enable_sequence_parallelism"),
        (2, {"fuse_gemm_comms": True, "enable_sp": True}, 1, "pass_config.enable_sp with"),
        (2, {"enable_sp": None, "fuse_allreduce_rms": False}, 1, None),
        (2, {"enable_sp": True}, 0, None),
        (1, {"enable_sp": True}, 1, None),
    ],
)
def test_leaves_all_reduce_patterns_alone(ranks, switches, gate_up_bytes, refused):
    """Refused where a fusion of all-reduce and RMSNorm would no longer match, and told why."""
    config = engine(
        parallel_config=Namespace(tensor_parallel_size=ranks),
        compilation_config=Namespace(pass_config=Namespace(**switches)),
    )
    reason = NoAllReducePattern().unmet(config, Namespace(gate_up_bytes=gate_up_bytes))
    assert (reason is None) if refused is None else (refused in (reason or ""))


def test_importing_the_pass_imports_no_torch():
    """Listing passes must stay fast: the module is free of torch until it patches."""
    code = (
        "import sys; from ascend_opt_passes.mlp_prefetch import MlpPrefetch; MlpPrefetch(); "
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "False", printed.stderr
