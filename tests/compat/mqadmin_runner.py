"""Runs the steps of `mqadmin_steps` in a cluster, and judges what came of it."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable

from .clusters import Cluster
from .mqadmin_clusters import CLUSTER, ROOT
from .mqadmin_shell import AdminShell, Printed
from .mqadmin_steps import SETTINGS_VARY, Step
from .mqadmin_text import has, plain_error, plain_lines, refusal

_PATIENCE_S = 40.0
_PAUSE_S = 0.5


class StepRunner:
    """One cluster, its tool, and what the steps so far have left for later ones."""

    def __init__(self, cluster: Cluster, shell: AdminShell) -> None:
        self.cluster = cluster
        self._shell = shell
        self._kept = {
            "broker": cluster.broker_address,
            "names": cluster.namesrv,
            "cluster": CLUSTER,
        }
        self._kept["password"] = ROOT[1]

    def run(self, steps: Iterable[Step]) -> list[Printed]:
        """Carry them out, one after the other."""
        return [self._run_step(step) for step in steps]

    def problems(self, step: Step, printed: Printed, *, apache: bool = False) -> list[str]:
        """In what a step did not say what it must."""
        wanted = step.code
        if apache and step.apache_code is not None:
            wanted = step.apache_code or None
        code = refusal(printed) if not step.enough else wanted
        found = [f"refused with {code} instead of {wanted}"] if code != wanted else []
        lines = plain_lines(printed.out, self.cluster)
        found += [f"does not say: {fact}" for fact in step.facts if not has(lines, fact)]
        found += [f"should not say: {fact}" for fact in step.absent if has(lines, fact)]
        if not found:
            return []
        said = "\n    ".join(["says:", *lines, *plain_error(printed, self.cluster)])
        return [f"{step.line}: {'; '.join(found)}\n  {said}"]

    def _run_step(self, step: Step) -> Printed:
        words = [word.format(**self._kept) for word in shlex.split(step.line)]
        if words[0] == "+sign":
            self._sign_as(*words[1:])
            return Printed("", "")
        if not words[0].startswith("+"):
            words[1:1] = ["-n", self.cluster.namesrv]
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            printed = self._shell.run(*words, enough=step.enough)
            done = not step.again or not self.problems(step, printed)
            if done or time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
        self._keep(step, printed)
        return printed

    def _sign_as(self, user: str = "", password: str = "") -> None:
        """Write the file from which the tool has its user, or remove it."""
        file = self._shell.home / "conf" / "tools.yml"
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        if user:
            file.write_text(f"accessKey: '{user}'\nsecretKey: '{password}'\n")

    def _keep(self, step: Step, printed: Printed) -> None:
        client = re.search(r"([\d.]+)@sellers", printed.out)
        if client is not None:
            self._kept["client"] = client.group(1)
        if step.save:
            words = printed.out.split()
            self._kept |= {f"{step.save}{place}": word for place, word in enumerate(words)}
            # An id that points behind the end of the log.
            self._kept["beyond"] = words[1][:-8] + "00FFFFFF"


def compare(
    step: Step, ours: tuple[StepRunner, Printed], theirs: tuple[StepRunner, Printed]
) -> list[str]:
    """The lines that only one of the clusters prints, apart from accepted differences."""
    if step.settings:
        mine, other = (_settings(runner, printed) for runner, printed in (ours, theirs))
        names = mine.keys() & other.keys()
        lines = [[f"{name} = {said[name]}" for name in names] for said in (mine, other)]
    else:
        lines = [_comparable(step, runner, printed) for runner, printed in (ours, theirs)]
    only_ours = [f"+ {line}" for line in lines[0] if line not in lines[1]]
    only_theirs = [f"- {line}" for line in lines[1] if line not in lines[0]]
    if not only_ours and not only_theirs and len(lines[0]) == len(lines[1]):
        return []
    return ["\n  ".join([step.line, *only_theirs, *only_ours])]


def _comparable(step: Step, runner: StepRunner, printed: Printed) -> list[str]:
    lines = plain_lines(printed.out, runner.cluster)
    if step.varies:
        lines = [line for line in lines if not re.fullmatch(step.varies, line)]
    different_end = step.enough or step.apache_code is not None
    return lines + ([] if different_end else plain_error(printed, runner.cluster))


def _settings(runner: StepRunner, printed: Printed) -> dict[str, str]:
    pairs = (line.partition(" =") for line in plain_lines(printed.out, runner.cluster))
    return {
        name: value.strip() for name, _, value in pairs if not re.fullmatch(SETTINGS_VARY, name)
    }
