"""Drives one engine through the same requests again and again, uva-staging switched in between.

Usage: ``staging_program.py MODEL PHASES [KEYWORDS_AS_JSON]``. PHASES is a comma-separated list;
each is ``off`` or passes joined by ``+``, then optionally ``/shallow`` (one buffer a pool, not two)
and ``/unguarded`` (the planted fault: the pass does not wait before it writes a buffer again).

Every phase starts from the same tables and rows, so what the device holds after a step can be
compared between phases. The device is asked by a copy that is queued behind the step and read at
the end of the phase: nothing is delivered earlier because somebody looked.

Prints, for each phase: tokens, the driver calls of each step, a digest of all tables on the device
after each step, and after how many steps the device did not hold what the host had written.
"""

import gc
import hashlib
import json
import random
import sys
from collections.abc import Callable
from typing import Any

from engine_program import ARRIVALS, KEYWORDS, prompt

NUM_TOKENS = 10


class Tables:
    """All UVA buffers of the runner, and the state of the runner that decides what is in them."""

    def __init__(self, runner: Any) -> None:
        from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor, UvaBufferPool

        gc.unfreeze()  # vLLM freezes its heap, and a frozen object is not listed
        objects = gc.get_referrers(UvaBufferPool, UvaBackedTensor)
        self.pools = [o for o in objects if type(o) is UvaBufferPool]
        backed = [o for o in objects if type(o) is UvaBackedTensor]
        self._rows = runner.req_states
        self._start = (
            list(self._rows.free_indices),
            [(t, t.np.copy()) for t in backed],
            [(p, p._curr, p.max_concurrency, list(p._uva_bufs)) for p in self.pools],
            [(b, b._np.copy()) for p in self.pools for b in p._uva_bufs],
        )

    def restore(self, depth: int | None = None) -> None:
        """Go back to the state at the beginning; `depth` gives each pool that many buffers."""
        import torch

        torch.npu.synchronize()
        free_rows, backed, pools, buffers = self._start
        for req_id in list(self._rows.req_id_to_index):  # the runner hears of the last ones late
            self._rows.remove_request(req_id)
        self._rows.free_indices[:] = free_rows
        for tensor, values in backed:
            tensor.np[:] = values
        for pool, current, max_concurrency, of_pool in pools:
            pool._uva_bufs[:] = of_pool
            pool.max_concurrency = depth or max_concurrency
            pool._curr = current % pool.max_concurrency
        for buffer, values in buffers:
            buffer._np[:] = values
            buffer._uva.copy_(buffer._cpu)
            buffer._modified_indices.clear()
        torch.npu.synchronize()

    def look(self) -> tuple[bytes, Any]:
        """Return what the host has written and, queued, what the device holds, of all buffers."""
        import torch

        buffers = [b for pool in self.pools for b in pool._uva_bufs]
        assert not any(b._modified_indices for b in buffers), "rows are marked after a step"
        held = torch.cat([b._uva.view(torch.uint8).flatten() for b in buffers])
        return b"".join(b._np.tobytes() for b in buffers), held


def drive(engine: Any, phase: str, tables: Tables) -> dict[str, Any]:
    """Send every request, with ids of this phase, and look at each step."""
    from vllm import SamplingParams

    from ascend_opt.simnpu import counters

    scheduler = engine.engine_core.engine_core.scheduler
    tokens: dict[str, list[int]] = {}
    steps: list[dict[str, Any]] = []
    looks: list[tuple[bytes, Any]] = []
    preempted: set[str] = set()
    finished_together = step = 0
    while step <= max(ARRIVALS) or engine.has_unfinished_requests():
        arrived = [index for index, arrival in enumerate(ARRIVALS) if arrival == step]
        for index in arrived:
            # A seed, or vLLM draws one, and that is in a table as well. One more token each: rows
            # of requests that finish together are freed in the order of a set of random ids.
            params = SamplingParams(
                max_tokens=NUM_TOKENS + index, temperature=0, ignore_eos=True, seed=7
            )
            engine.add_request(f"{phase}-{index}", prompt(index), params)
        counters.mark(f"{phase} {step}")
        before = counters.snapshot()
        outputs = engine.step()
        done = counters.snapshot() - before
        looks.append(tables.look())
        finished_together = max(finished_together, sum(output.finished for output in outputs))
        for output in outputs:
            if output.finished:
                index = output.request_id.rpartition("-")[2]
                tokens[index] = list(output.outputs[0].token_ids)
        preempted |= {r for r, request in scheduler.requests.items() if request.num_preemptions}
        steps.append({"calls": done.nonzero(), "executed": done.executed["memcpy_async_h2d"]})
        step += 1
    on_device = [held.cpu().numpy().tobytes() for _, held in looks]
    return {
        "tokens": tokens,
        "steps": steps,
        "preempted": len(preempted),
        "finished_together": finished_together,
        "digests": [hashlib.sha256(held).hexdigest()[:16] for held in on_device],
        "wrong": sum(held != look[0] for held, look in zip(on_device, looks, strict=True)),
    }


def device_side(buffer: Any) -> Any:
    """Read a buffer as vLLM does, and queue a copy of it."""
    uva = buffer.uva
    return (uva() if callable(uva) else uva).clone()  # a method since 0.30.0rc1


def random_writes(switch: Callable[[bool], None], how: str) -> list[str]:
    """Write buffers in every way, read them now and then; return what the device held each time.

    `how` is ``off``, ``on`` or ``switched``: now and then, rows being marked or not. Upstream's
    copies are waited for where they are made, since from 0.27.1rc1 on they are asynchronous and
    nothing keeps the next write from their source; ours never are.
    """
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

    rng, switches = random.Random(11), random.Random(3)
    buffers = [UvaBuffer(7, torch.int32), UvaBuffer((6, 3), torch.float32)]
    held = []
    on = how == "on"
    switch(on)
    for number in range(400):
        buffer = buffers[number % 2]
        rows = len(buffer._np)
        n, m = sorted((rng.randrange(rows + 1), rng.randrange(rows + 1)))
        row = rng.randrange(rows)
        keys = [slice(None, m), slice(None, m), slice(0, m), slice(None), slice(n, m), row]
        keys += [slice(None, m, 2), slice(-rows, m), row - rows, [row], (row,), (slice(0, m),)]
        keys += [np.arange(rows) == row, ..., slice(None, m), slice(None, m)]
        key = keys[rng.randrange(len(keys))]
        shape = buffer._np[key].shape
        # Few values: some writes must change nothing.
        value = np.array([rng.choice([0, 0, 1, -0.0]) for _ in range(int(np.prod(shape)))])
        value = value.reshape(shape).astype(buffer._np.dtype)
        if rng.random() < 0.4:
            buffer.cpu[key] = torch.from_numpy(value)
        else:
            buffer.np[key] = value.tolist() if value.size and rng.random() < 0.3 else value
        if how == "switched" and switches.random() < 0.1:
            on = not on
            switch(on)
        if rng.random() < 0.5:
            by_upstream = not on or bool(buffer._modified_indices)
            held.append(device_side(buffer))
            if by_upstream:
                torch.npu.synchronize()
    switch(False)
    held += [device_side(buffer) for buffer in buffers]
    return [tensor.cpu().numpy().tobytes().hex() for tensor in held]


def overwrites() -> int:
    """Write a pool more often than it has buffers, in one go; return how many came out wrong."""
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool

    pool = UvaBufferPool(4, torch.int32, 2)
    values = [np.full(4, number, np.int32) for number in range(1, 7)]
    held = [pool.copy_to_uva(value).clone() for value in values]
    return sum(h.cpu().numpy().tolist() != v.tolist() for h, v in zip(held, values, strict=True))


def unguarded() -> Any:
    """Plant the fault; return what takes it out again."""
    from ascend_opt_passes.uva_staging import UvaStaging

    right = UvaStaging._wait_for
    UvaStaging._wait_for = lambda self, staged: None
    return lambda: setattr(UvaStaging, "_wait_for", right)


def main() -> None:
    import ascend_opt

    model, phases = sys.argv[1], sys.argv[2].split(",")
    keywords = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    from vllm import LLM

    engine: Any = LLM(model, **{**KEYWORDS, **keywords}).llm_engine
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    tables = Tables(runner)
    drive(engine, "warmup", tables)  # what happens once must not be counted
    result: dict[str, Any] = {
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "async_scheduling": engine.vllm_config.scheduler_config.async_scheduling,
        "steps_in_flight": core.batch_queue_size,
        "depths": sorted({pool.max_concurrency for pool in tables.pools}),
        "tables": len(tables.pools),
    }
    for number, phase in enumerate(phases):
        key = phase if phase not in result else f"{phase}-{number}"
        what, *variations = phase.split("/")
        names = [] if what == "off" else what.split("+")
        tables.restore(depth=1 if "shallow" in variations else None)
        right_again = unguarded() if "unguarded" in variations else lambda: None
        for name in names:
            ascend_opt.enable(name)
        result[key] = drive(engine, key, tables)
        result[key]["states"] = {s.name: s.as_dict() for s in ascend_opt.status()}
        for name in names:
            ascend_opt.disable(name)
        right_again()

    def switch(on: bool) -> None:
        (ascend_opt.enable if on else ascend_opt.disable)("uva-staging")

    result["writes"] = {how: random_writes(switch, how) for how in ("off", "on", "switched")}
    result["overwritten"] = {"upstream": overwrites()}
    switch(True)
    result["overwritten"]["guarded"] = overwrites()
    result["overwriting"] = {s.name: s.as_dict() for s in ascend_opt.status()}["uva-staging"]
    right_again = unguarded()
    result["overwritten"]["unguarded"] = overwrites()
    right_again()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
