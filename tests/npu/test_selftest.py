"""The simulated device itself, through torch_npu: faults show, and errors name what is wrong."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from npu.conftest import Simulate, read_result

from ascend_opt.simnpu import cli, selftests
from ascend_opt.simnpu.installation import Installation
from ascend_opt.simnpu.launch import Compute


def test_correct_program_passes_and_each_planted_fault_is_caught(
    installation: Installation,
) -> None:
    """Missing host wait, missing stream wait, source overwritten early: all give wrong values."""
    done = CliRunner().invoke(cli.simnpu, ["selftest"])
    assert done.exit_code == 0, done.output
    assert done.output.count("wrong values │ wrong values │ ok") == 3
    assert done.output.count("right values │ right values │ ok") == 1


def test_now_delivery_hides_the_faults(simulate: Simulate) -> None:
    """With delivery ``now`` a missing host wait goes unnoticed: why ``late`` is the default."""
    done = simulate(Path(selftests.__file__), "host-wait", deliver="now")
    assert done.stdout.strip() == "right values"


@pytest.mark.parametrize("compute", ["full", "none"])
def test_triton_may_be_imported_before_torch_npu(simulate: Simulate, compute: Compute) -> None:
    """Programs import vLLM first, and it reaches for either first, by release."""
    done = simulate("import triton, vllm, torch_npu; print('imported')", compute=compute)
    assert done.stdout.splitlines()[-1] == "imported"


def test_operator_without_a_kernel_fails_with_its_name(simulate: Simulate) -> None:
    """A quantised matmul is refused by name, not computed as zeros."""
    program = """
import torch, torch_npu
x = torch.ones(2, 2, dtype=torch.int8, device="npu")
try:
    torch_npu.npu_quant_matmul(x, x, torch.ones(2, device="npu"))
except NotImplementedError as error:
    print("refused:", error)
"""
    out = simulate(program).stdout
    assert "refused: simnpu has no kernel for npu::npu_quant_matmul" in out


TASK_QUEUE = """
import json, time
import torch, torch_npu
from ascend_opt.simnpu import operators

weight = torch.ones(1024, device="npu")
weight * 2  # first use loads things
torch.npu.synchronize()
operators.library().settle()

def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

slow = lambda: operators.launch("slow", lambda: time.sleep(0.3))
prefetch = lambda: torch_npu.npu_prefetch(weight, None, 1024)
first = {"slow": seconds(slow), "prefetch": seconds(prefetch)}
torch.npu.synchronize()
second = {"slow": seconds(slow), "multiply": seconds(lambda: weight * 2)}
torch.npu.synchronize()
print("RESULT " + json.dumps({"first": first, "second": second}))
"""


@pytest.mark.parametrize("queue", ["0", "1"])
def test_eager_prefetch_drains_the_task_queue(simulate: Simulate, queue: str) -> None:
    """With TASK_QUEUE_ENABLE=1 npu_prefetch waits for what is queued; a multiplication does not."""
    # With immediate delivery a driver call lasts as long as its kernel, so this one is slow.
    done = simulate(TASK_QUEUE, deliver="now", environ={"TASK_QUEUE_ENABLE": queue})
    times = read_result(done)
    if queue == "0":
        assert times["first"]["slow"] >= 0.3  # the call itself was made here, at once
        assert times["first"]["prefetch"] < 0.2
    else:
        assert times["first"]["slow"] < 0.2
        assert times["first"]["prefetch"] >= 0.1
        assert times["second"]["multiply"] < 0.2


def test_task_queue_keeps_the_order_of_copies_and_kernels(simulate: Simulate) -> None:
    """With TASK_QUEUE_ENABLE=1 kernels and copies still take effect in program order."""
    program = """
import json, torch, torch_npu
x = torch.zeros(1000, device="npu")
for i in range(50):
    x.copy_(torch.full((1000,), float(i)).pin_memory(), non_blocking=True)
    x += 1
    torch.npu.current_stream().record_event()
out = torch.empty(1000).pin_memory()
out.copy_(x, non_blocking=True)
torch.npu.synchronize()
print("RESULT " + json.dumps({"values": sorted(set(out.tolist()))}))
"""
    done = simulate(program, environ={"TASK_QUEUE_ENABLE": "1"})
    assert read_result(done)["values"] == [50.0]


def test_trace_names_stream_bytes_step_and_source_line(
    installation: Installation, tmp_path: Path
) -> None:
    """`run --trace` writes a Perfetto trace whose calls carry the program's own file and line."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch_npu\n"
        "from ascend_opt.simnpu import counters\n"
        "x = torch.ones(256, device='npu')\n"
        "counters.mark('step 5')\n"
        "torch_npu.npu_prefetch(x, None, 1024)\n"
        "torch.npu.synchronize()\n"
    )
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(
        cli.simnpu, ["run", "--trace", str(out), "--", sys.executable, str(program)]
    )
    assert done.exit_code == 0, done.output
    events = json.loads(out.read_text())["traceEvents"]
    calls = [e for e in events if e.get("cat") == "cmo_async" and e["ph"] == "i"]
    assert [e["args"]["bytes"] for e in calls] == [1024]
    assert calls[0]["args"]["at"] == f"{program}:5"
    assert calls[0]["args"]["step"] == "step 5"
    ran = [e for e in events if e.get("cat") == "cmo_async" and e["ph"] == "X"]
    assert len(ran) == 1


def test_unjoined_side_stream_is_an_error_in_torch_npu(simulate: Simulate) -> None:
    """A captured side stream that nobody waits for fails the capture, as on a card."""
    program = """
import torch, torch_npu
side, x = torch.npu.Stream(), torch.ones(8, device="npu")
try:
    with torch.npu.graph(torch.npu.NPUGraph()):
        y = x * 2
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            z = y + 1
except RuntimeError as error:
    print("refused:", error)
"""
    out = simulate(program).stdout
    assert "refused:" in out
    assert "unjoined work" in out
