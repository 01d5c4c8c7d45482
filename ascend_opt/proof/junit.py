"""A verification as JUnit XML, for a CI server to show."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from ascend_opt.proof.verify import Verdict, Verification


def junit(found: Verification) -> str:
    """Return one test case for the engine, for each pass, for the noise and for each prompt."""
    suite = ET.Element("testsuite", name="ascend_opt verify")
    cases: list[tuple[str, str | None]] = [
        ("the engine runs", found.reason if found.verdict is Verdict.ENGINE_DIED else None)
    ]
    cases += [(f"{item.name} was on", item.problem) for item in found.activity]
    if found.noise is not None:
        prompts = sorted(prompt + 1 for prompt in found.noise.prompts())
        noisy = f"two unpatched runs differ on prompts {prompts}" if prompts else None
        cases.append(("unpatched runs agree", noisy))
        blamed = {difference.prompt: difference for difference in found.blamed()}
        for prompt in range(found.prompts):
            difference = blamed.get(prompt)
            message = None if difference is None else str(difference)
            cases.append((f"prompt {prompt + 1} is equal", message))
    for name, problem in cases:
        case = ET.SubElement(suite, "testcase", classname="ascend_opt.verify", name=name)
        if problem is not None:
            ET.SubElement(case, "failure", message=problem).text = found.log or problem
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(problem is not None for _, problem in cases)))
    suite.set("errors", "0")
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
