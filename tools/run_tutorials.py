"""Run of the tutorials and the README: every command of each page, in order, in an empty folder of its own.

    python tools/run_tutorials.py [PAGE ...]        (default: all pages; `make tutorials`)

The `anabranch` of the Python that runs this is what is tried: `make tutorials` installs the wheel for it.
Commands are taken from the pages' blocks. Most are run as they stand. STAND_INS names those that
cannot be: another command with the same steps but smaller, in the background, or on loopback; or a reason
why it is left out, which is printed. A command that fails, and a stand-in for a command that no page has,
end the run with status 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anabranch.config import load_run_file, render_run_file, with_changes

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "tutorials"
README = "README"
#: Seconds after which a command counts as stuck: ten times what the longest takes on two free cores.
LIMIT_S = 900.0
#: Values of run files in a trial: a minute on two cores.
SMALL = {
    "run.steps": 6, "model.size": "llama-tiny", "data.vocab_size": 300, "batch.microbatches": 4,
    "batch.rows": 1, "batch.sequence": 64, "evaluation.every": 3, "evaluation.windows": 1,
    "optimizer.warmup_steps": 2, "compute.dtype": "fp32", "compute.device": "cpu",
}  # fmt: skip
#: Steps of the first run: it goes on while other commands of the page run, as a relay is killed after them.
FIRST_RUN_STEPS = 100
#: Steps of the README's run, which Ctrl+C stops before its end.
STOPPED_RUN_STEPS = 60
LOOPBACK = {"network.host": "127.0.0.1", "network.port": 0, "fleet.minimum": 1}
JOIN = "anabranch join {ticket} --host 127.0.0.1 --port 0 --home home-"


@dataclass(frozen=True)
class Instead:
    """Stand-in for a command. command: to run ("": none). background: True if it goes on while the next ones
    run, and is awaited at the page's end. edit: run file that is made small afterwards. why: reason."""

    why: str
    command: str = ""
    background: bool = False
    edit: str = ""
    changes: tuple[tuple[str, object], ...] = ()
    until: str = ""
    """File that has to be there before the next command."""


def lan(name: str, **changes: object) -> Instead:
    return Instead(
        "smaller, on loopback", name, edit=name.split()[2], changes=tuple({**LOOPBACK, **changes}.items())
    )


STARTED = Instead(
    "goes on beside the volunteers", "anabranch start run.toml", True, until="runs/*/tickets.json"
)
STAND_INS: dict[str, dict[str, Instead]] = {
    README: {
        "make train": Instead("needs the checkout; as in first-run"),
        "make test": Instead("the tests"),
        "anabranch init run.toml --name mine --model gpt-tiny --data my-texts": Instead(
            "smaller",
            "anabranch init run.toml --name mine --model gpt-tiny --data my-texts",
            edit="run.toml",
            changes=(("model.size", "gpt-tiny"), ("run.steps", STOPPED_RUN_STEPS)),
        ),
        "anabranch train run.toml": Instead(
            "until Ctrl+C", "anabranch train run.toml", True, until="runs/mine/log.jsonl"
        ),
        "anabranch resume runs/mine --local": Instead(
            "after Ctrl+C", "INTERRUPT mine && anabranch resume runs/mine --local"
        ),
        "anabranch start run.toml": Instead(
            "a run that is not there yet", "anabranch start led.toml", True, until="runs/led/tickets.json"
        ),
        "pip install anabranch-0.1.0-py3-none-any.whl": Instead("what runs here was installed so"),
        "anabranch doctor anabranch1:...": Instead("a run on loopback", "anabranch doctor {ticket}"),
        "anabranch join anabranch1:... --name ada --region London": Instead(
            "on loopback", f"{JOIN}a --name ada --region London", True
        ),
        "anabranch join anabranch1:... --gpus all --hours 22:00-07:00": Instead(
            "without a GPU, at any hour", f"{JOIN}b --hours 00:00-23:59 && WAIT"
        ),
        "anabranch watch --open": Instead(
            "no browser, for six seconds", "timeout --signal=INT 6 anabranch watch; test $? = 124"
        ),
        "anabranch simtest": Instead("few seeds", "anabranch simtest --seeds 0:6"),
        "anabranch chaos --minutes 1": Instead(
            "shorter, with few relays", "anabranch chaos --minutes 0.2 --calm-minutes 0 --population 8"
        ),
        "anabranch simulate wan10 --set churn.crash=0.1": Instead(
            "fewer iterations", "anabranch simulate wan10 --set churn.crash=0.1 run.iterations=4"
        ),
        "anabranch plan forty --model llama-1b": Instead(
            "one number of stages", "anabranch plan forty --model llama-1b --stages 4 --simulate 0"
        ),
        "python example.py": Instead("fewer steps", "python example.py"),
    },
    "first-run": {
        "make train": Instead("fewer steps", "anabranch train small.toml", True, until="runs/tiny/log.jsonl"),
        "anabranch watch --open": Instead("no browser", "anabranch watch --help"),
        "kill -9 PID": Instead("a relay of stage 2 by its id", "KILL relay-2"),
        "anabranch verify runs/tiny": Instead("once the run is over", "WAIT && anabranch verify runs/tiny"),
    },
    "own-data": {
        "anabranch init mine.toml --name mine --data /data/my-texts": Instead(
            "a folder of texts of this trial",
            "anabranch init mine.toml --name mine --data texts",
            edit="mine.toml",
        ),
    },
    "own-model": {
        "anabranch init mine.toml --name mine --model llama-160m --stages 4 --relays 8": Instead(
            "as it stands", "anabranch init mine.toml --name mine --model llama-160m --stages 4 --relays 8"
        ),
        "anabranch init more.toml --name more --steps 50": Instead(
            "with the keys that the page says",
            "anabranch init more.toml --name more --steps 50",
            edit="more.toml",
            changes=(("model.initial_weights", "tiny-hf"), ("optimizer.lr", 5e-4)),
        ),
        "anabranch check-model run.toml": Instead(
            "the example of the page", "anabranch check-model moe.toml"
        ),
    },
    "train-over-home-lines": {
        "anabranch init home.toml --name home --wire int8 --sums coarse": Instead(
            "smaller", "anabranch init home.toml --name home --wire int8 --sums coarse", edit="home.toml"
        ),
    },
    "lead-on-a-lan": {
        "anabranch init run.toml --name lan --model llama-160m --stages 2": lan(
            "anabranch init run.toml --name lan --model llama-160m --stages 2"
        ),
        "anabranch start run.toml": STARTED,
        "anabranch join anabranch1:... --name box2 --host 0.0.0.0 --port 7701 "
        "--advertise 192.168.1.11:7701": Instead("two machines on loopback", f"{JOIN}a --name box2", True),
        "anabranch join anabranch1:... --corpus ./corpus --host 0.0.0.0 --port 7702 "
        "--advertise 192.168.1.12:7702": Instead(
            "a second relay, as two stages need, in place of a data node", f"{JOIN}b --name box3", True
        ),
    },
    "lend-a-machine": {
        "pip install anabranch-0.1.0-py3-none-any.whl": Instead("what runs here was installed so"),
        "anabranch doctor anabranch1:...": Instead("a run on loopback", "LEAD && anabranch doctor {ticket}"),
        "anabranch join anabranch1:... --name ada --region London": Instead(
            "on loopback", f"{JOIN}a --name ada --region London", True
        ),
        "anabranch join anabranch1:... --host 0.0.0.0 --port 7701 --advertise my.host:7701": Instead(
            "on loopback", f"{JOIN}b", True
        ),
    },
    "lead-over-the-internet": {
        "anabranch doctor --answer --host 0.0.0.0": Instead("needs two machines"),
        "anabranch doctor --peer other.host:7701/CODE": Instead("needs two machines"),
        "anabranch start run.toml": Instead("as in lead-on-a-lan", "anabranch start --help"),
    },
    "lead-on-a-spot-fleet": {
        "anabranch start run.toml": Instead("as in lead-on-a-lan", "anabranch start --help"),
        'anabranch join "$TICKET" --host 0.0.0.0 --port 7701 '
        "--advertise \"$(hostname -I | cut -d' ' -f1):7701\" "
        "--region London --patience 600": Instead("as in lend-a-machine"),
        "anabranch verify runs/spot": Instead("no fleet was rented"),
        "anabranch simulate --from runs/spot": Instead("no fleet was rented"),
    },
}


def commands(page: str) -> list[str]:
    """Commands of a page, without `.venv/bin/` and comments; the README's Python is `python example.py`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), flags=re.MULTILINE | re.DOTALL)
    found = []
    for language, block in blocks:
        if page == README and language == "python":
            found.append("python example.py")
        elif language == ("" if page == README else "bash"):
            lines = (re.sub(r"\s+#\s.*$", "", line) for line in block.splitlines())
            found += [line.replace(".venv/bin/", "").strip() for line in lines if line.strip()]
    return found


def text_of(page: str) -> str:
    return (ROOT / "README.md" if page == README else PAGES / f"{page}.md").read_text("utf-8")


def page_names() -> list[str]:
    return [README, *sorted(path.stem for path in PAGES.glob("*.md") if commands(path.stem))]


class Trial:
    """Tutorial page in a folder of its own."""

    def __init__(self, page: str, folder: Path, first_run: Path) -> None:
        self.page, self.folder = page, folder
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ANABRANCH_CORPORA": "off",
            "ANABRANCH_MODELS": "moe=mixture_of_experts:build",
            "PYTHONPATH": str(ROOT / "docs" / "examples"),
        }
        self.waiting: list[subprocess.Popen[bytes]] = []
        self._prepare(first_run)

    def _prepare(self, first_run: Path) -> None:
        texts = self.folder / "texts"
        texts.mkdir(parents=True)
        for number in range(40):
            (texts / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox {number * 7}\n" * 60)
        if self.page == "own-model":
            shutil.copytree(first_run / "runs", self.folder / "runs")
        text = text_of(self.page)
        if self.page == README:
            shutil.copytree(texts, self.folder / "my-texts")
            [example] = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
            assert '"run.steps": 50' in example
            (self.folder / "example.py").write_text(example.replace('"run.steps": 50', '"run.steps": 5'))
        if self.page == "lead-on-a-spot-fleet":
            scenario = re.search(r"^```toml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
            assert scenario is not None
            (self.folder / "fleet.toml").write_text(scenario.group(1))
        own = {"data.source": "text", "data.path": str(texts)}
        shape = {"dim": 16, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 24, "vocab_size": 300}
        moe = {f"model.{key}": value for key, value in shape.items()} | {"model.architecture": "moe"}
        named = {
            "small.toml": {**own, "run.steps": FIRST_RUN_STEPS},
            "moe.toml": {**own, **moe, "pipeline.stages": 2},
            "run.toml": {**own, **LOOPBACK, "pipeline.stages": 1},
            "led.toml": {**own, **LOOPBACK, "pipeline.stages": 1},
        }
        led = {README: "led.toml", "lend-a-machine": "run.toml"}.get(self.page)
        for name, changes in named.items():
            if name == led or name not in ("run.toml", "led.toml"):
                self._shell(f"anabranch init {name} --name {'led' if name == led else 'tiny'}")
                self._edit(name, changes)

    def run(self) -> Iterator[str]:
        """Run all commands; yields a line for each. Raises RuntimeError if one fails."""
        stand_ins = STAND_INS.get(self.page, {})
        unknown = stand_ins.keys() - set(commands(self.page))
        if unknown:
            raise RuntimeError(f"{self.page}.md has no command {sorted(unknown)[0]!r}: correct STAND_INS")
        for command in commands(self.page):
            instead = stand_ins.get(command, Instead("", command))
            if not instead.command:
                yield f"  left out  {command}  ({instead.why})"
                continue
            begun = time.monotonic()
            self._do(instead)
            if instead.edit:
                self._edit(instead.edit, dict(instead.changes))
            shown = (
                command if instead.command == command else f"{command}  ({instead.why}: {instead.command})"
            )
            yield f"  ran  {shown}  {time.monotonic() - begun:.0f} s"
        self._wait()

    def _do(self, instead: Instead) -> None:
        for part in instead.command.split(" && "):
            if part == "WAIT":
                self._wait()
            elif part == "LEAD":
                self._do(STARTED)
            elif part.startswith("KILL "):
                self._kill(part.removeprefix("KILL "))
            elif part.startswith("INTERRUPT "):
                self._has_step(part.removeprefix("INTERRUPT "))
                os.killpg(self.waiting[-1].pid, signal.SIGINT)  # as a terminal does
                self._wait()
            elif instead.background:
                # Without a shell in between, which Ctrl+C would end.
                command = f"exec {self._filled(part)}"
                self.waiting.append(
                    subprocess.Popen(command, shell=True, cwd=self.folder, env=self.environment,
                                     stdout=subprocess.DEVNULL, start_new_session=True)
                )  # fmt: skip
            else:
                self._shell(part)
        deadline = time.monotonic() + LIMIT_S
        while instead.until and not list(self.folder.glob(instead.until)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{instead.command}: no {instead.until} appeared")
            time.sleep(0.2)

    def _filled(self, command: str) -> str:
        if "{ticket}" not in command:
            return command
        path = max(self.folder.glob("runs/*/tickets.json"), key=lambda path: path.stat().st_mtime)
        return command.replace("{ticket}", json.loads(path.read_text())["relay"])

    def _shell(self, command: str) -> None:
        done = subprocess.run(self._filled(command), shell=True, cwd=self.folder, env=self.environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command}: status {done.returncode}\n{done.stdout.decode()[-2000:]}")

    def _edit(self, name: str, changes: dict[str, object]) -> None:
        path = self.folder / name
        own = {"data.source": "text", "data.path": str(self.folder / "texts")}
        path.write_text(render_run_file(with_changes(load_run_file(path), {**SMALL, **own, **changes})))

    def _kill(self, name: str) -> None:
        """Kill the first process of the swarm in this folder that has this name, once a step was taken."""
        self._has_step("tiny")
        for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            try:
                line = (process / "comm").read_text()
                inside = os.path.realpath(process / "cwd") == os.path.realpath(self.folder)
            except OSError:
                continue
            if inside and name in line:
                os.kill(int(process.name), signal.SIGKILL)
                return
        raise RuntimeError(f"no process {name} runs in {self.folder}")

    def _has_step(self, run: str) -> None:
        """Wait until a run has taken a step."""
        events = self.folder / "runs" / run / "events.jsonl"
        deadline = time.monotonic() + LIMIT_S
        while not (events.is_file() and '"kind":"step"' in events.read_text()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{run}: no step was taken")
            time.sleep(0.2)

    def _wait(self) -> None:
        for process in self.waiting:
            if process.wait(LIMIT_S):
                raise RuntimeError(f"{process.args!r}: status {process.returncode}")
        self.waiting.clear()

    def close(self) -> None:
        """End what still runs."""
        for process in self.waiting:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)


def main(pages: list[str]) -> int:
    names = pages or page_names()
    names.sort(key=lambda name: name != "first-run")  # its run is used by others
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        for page in names:
            print(f"{page}.md", flush=True)
            begun = time.monotonic()
            trial = Trial(page, Path(root) / page, Path(root) / "first-run")
            try:
                for line in trial.run():
                    print(line, flush=True)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"  FAILED  {error}", flush=True)
                failed += 1
            finally:
                trial.close()
            print(f"  {time.monotonic() - begun:.0f} s in all", flush=True)
    print(f"{len(names) - failed} of {len(names)} pages ran")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
