"""A comparison's limits as JUnit XML, so that CI shows each as a test: one case for each limit, stage and NEW."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree

from vllm_locust.report.comparison_rows import gate_sentence, heading
from vllm_locust.report.text import printable

Json = Mapping[str, Any]
_ELEMENTS: Final = {"failed": "failure", "undecided": "error"}
_NOT_IN_XML: Final = {0xFFFE: " ", 0xFFFF: " "}
"""Beside control characters, which ``printable`` takes out."""


def render_junit(result: Json) -> str:
    """Failed limits are failures; those that could not be decided are errors."""
    root = ElementTree.Element("testsuites", name="vllm-locust compare")
    for comparison in result["comparisons"]:
        gates = comparison["gates"]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=printable(heading(result, comparison)),
            tests=str(len(gates)),
            failures=str(sum(gate["status"] == "failed" for gate in gates)),
            errors=str(sum(gate["status"] == "undecided" for gate in gates)),
        )
        for gate in gates:
            name = f"{gate['fail_if']} [stage {gate['stage']}]"
            case = ElementTree.SubElement(
                suite, "testcase", classname=printable(comparison["new"]["label"]), name=printable(name)
            )
            sentence = printable(gate_sentence(gate))
            if gate["status"] in _ELEMENTS:
                ElementTree.SubElement(case, _ELEMENTS[gate["status"]], message=sentence).text = sentence
            else:
                ElementTree.SubElement(case, "system-out").text = sentence
    buffer = io.BytesIO()
    ElementTree.ElementTree(root).write(buffer, encoding="utf-8", xml_declaration=True)
    return buffer.getvalue().decode("utf-8").translate(_NOT_IN_XML) + "\n"
