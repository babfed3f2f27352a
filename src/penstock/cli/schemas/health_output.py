"""JSON of `penstock check` and `penstock doctor`."""

from typing import Annotated, Literal

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class CheckProblem(JsonValue):
    """A check that is not OK."""

    state: Literal["WARNING", "CRITICAL", "UNKNOWN"]
    text: str


class CheckFigure(JsonValue):
    """A figure that was checked, as in the performance data of the text."""

    name: str
    value: float | None
    unit: Annotated[str, doc("`%`, `s` or empty")]
    warning: Annotated[float | None, doc("threshold; null if it is not checked")]
    critical: float | None


class CheckReport(JsonValue):
    """The result of all checks."""

    state: Annotated[
        Literal["OK", "WARNING", "CRITICAL", "UNKNOWN"],
        doc("exit code 0: `OK`, 1: `WARNING`, 2: `CRITICAL`, 3: `UNKNOWN`"),
    ]
    text: str
    problems: list[CheckProblem]
    figures: list[CheckFigure]


class DoctorFinding(JsonValue):
    """A problem that was found."""

    severity: Literal["error", "warning", "note"]
    subject: Annotated[str, doc("kind of the problem, such as `address` or `clock`")]
    where: Annotated[str, doc("broker, NameServer, topic or group; `here` for this machine")]
    text: str
    next_step: str


class DoctorReport(JsonValue):
    """All findings, the worst first, and what could not be examined."""

    findings: list[DoctorFinding]
    skipped: Annotated[list[str], doc("examinations that were not possible, with the reason")]


OUTPUTS = {
    "check": JsonOutput(CheckReport),
    "doctor": JsonOutput(DoctorReport),
}
