"""Says in words which rank of a training run hangs, and where.

    python scripts/who_hangs.py who_hangs                        # a folder with the ranks' notes
    python scripts/who_hangs.py --pids $(pgrep -f train.py)      # running processes, with py-spy

Ranks write notes when their script has the lines that docs/troubleshooting.md names under "Who
hangs?". A note holds the stack of the rank's main thread, and the entries of torch's flight
recorder: the collectives that the rank has called, of gloo and of nccl. The entries come from
private functions of torch 2.8 and newer. With --pids there are stacks alone, and the processes must
be ranks of one run on this machine.
"""

import argparse
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 12  # A rank writes every 5 seconds. After 12 without a note, or in a wait, it counts.
HERE = os.uname().nodename
# In these files is no code of the user: installed packages and Python's own modules.
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<")
MISSING = {  # what is said of a rank of which nothing is known, with --pids or without
    True: "is not among these processes: not started, or on another machine",
    False: "has written no note: it was not started, or did not come to the lines",
}
UNEVEN = ("gather", "scatter", "alltoall", "all_to_all")  # Shapes may differ between their ranks.


# What is known of the ranks: notes that they have written, or what py-spy sees.


def read_calls(texts):
    """Returns the collectives of a note, by library and process group and then by number."""
    calls = {}
    for text in texts:  # one for each library that has a recorder of its own
        for entry in json.loads(text).get("entries", ()):
            if not entry["is_p2p"]:
                # gloo and nccl count their collectives apart, also in one process group.
                library = entry["profiling_name"].partition(":")[0].replace("nccl2", "nccl")
                group = calls.setdefault((library, entry["process_group"][0]), {})
                group[entry["collective_seq_id"]] = entry
    return calls


def read_notes(folder):
    """Returns the notes of the newest run, by rank."""
    notes = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    for note in notes:
        recorder = note["recorder"]
        # Scripts with the lines of an earlier version of the page write gloo's text alone.
        note["calls"] = read_calls([recorder] if isinstance(recorder, str) else recorder)
    newest = max(notes, key=lambda note: note["time"], default={})
    return {note["rank"]: note for note in notes if note["rank"] < newest["world_size"]}


@dataclass
class Process:
    """What the system knows of a process: its number, parent, environment and command line."""

    pid: int
    parent: int
    env: dict
    argv: list

    def read_option(self, default, *names):
        """Returns the number given to an option of the command line."""
        for name, value in zip(self.argv, [*self.argv[1:], ""], strict=True):
            name, _, joined = name.partition("=")
            if name in names and (joined or value).isdigit():
                return int(joined or value)
        return default


def read_process(pid):
    """Returns a process; None where it has ended or belongs to somebody else."""
    folder = Path(f"/proc/{pid}")
    try:
        environ, command, stat = (
            (folder / name).read_text(errors="replace") for name in ("environ", "cmdline", "stat")
        )
    except OSError:
        return None
    env = dict(re.findall(r"(\w+)=([^\0]*)", environ))
    parent = int(stat.rpartition(")")[2].split()[1])
    return Process(int(pid), parent, env, command.split("\0")[:-1])


def read_spawned(parents):
    """Returns the children that mp.spawn has started, in order; their names lack the script's."""
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    processes = [process for process in map(read_process, pids) if process]
    return [p for p in processes if p.parent in parents and "spawn_main" in " ".join(p.argv)]


def find_ranks(pids):
    """Returns {process id: (rank, world size)} of those processes that are ranks."""
    processes = [process for process in map(read_process, sorted(pids)) if process]
    for rank, world_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        found = [p for p in processes if rank in p.env]
        if found:
            return {p.pid: (int(p.env[rank]), int(p.env.get(world_size, -1))) for p in found}
    in_options = {
        p.pid: p.read_option(0 if "--world-size" in p.argv else None, "-r", "--rank")
        for p in processes
    }
    found = [p for p in processes if in_options[p.pid] is not None]
    if found:  # such as mnmc_ddp_tcp.py, which gets its rank on the command line
        return {p.pid: (in_options[p.pid], p.read_option(1, "--world-size")) for p in found}
    ranks, spawned = {}, read_spawned({p.pid for p in processes})
    for number, child in enumerate(spawned):  # such as those of mnmc_ddp_mp.py
        parent = next(p for p in processes if p.pid == child.parent)
        size = parent.read_option(len(spawned), "--nproc-per-node")
        first = size * parent.read_option(0, "--node-rank")
        ranks[child.pid] = (first + number, size * parent.read_option(1, "--nodes"))
    return ranks


def ask_py_spy(pids):
    """Returns notes with stacks alone, by rank, of processes on this machine."""
    if not shutil.which("py-spy"):
        sys.exit("--pids needs py-spy: pip install py-spy")
    ranks = find_ranks(pids)
    if not ranks:
        sys.exit(
            "none of these processes is a rank: they have no RANK or SLURM_PROCID in their "
            "environment, no --rank in their command, and no children of mp.spawn"
        )
    notes = {}
    for pid, (rank, world_size) in ranks.items():
        stack = read_stack(pid) if rank not in notes else []
        if stack:  # It is no launcher, no shell, and no worker of a data loader.
            notes[rank] = {"rank": rank, "world_size": world_size, "host": HERE, "pid": pid}
            notes[rank] |= {"time": time.time(), "running": True, "stack": stack, "calls": {}}
    if not notes:
        sys.exit(f"py-spy cannot read them, perhaps you must be root: py-spy dump -p {min(ranks)}")
    return notes


def read_stack(pid):
    """Returns the stack of a process's main thread; none where py-spy cannot read it."""
    command = ["py-spy", "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        threads = json.loads(subprocess.run(command, capture_output=True).stdout)
    except (OSError, ValueError):  # It is not installed, or must not look into the process.
        return []
    for thread in threads:
        frames = [(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"]]
        # The main thread; its outermost frame is the second with python -m.
        if frames and frames[-1][2] in ("<module>", "_run_module_as_main"):
            return [[*frame, linecache.getline(*frame[:2])] for frame in reversed(frames)]
    return []


def read_process_state(note):
    """Returns the letter that ps shows: T for stopped, Z for gone; "" on another machine."""
    if note["host"] != HERE:
        return ""
    try:
        return Path(f"/proc/{note['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


# The collective that keeps them waiting.


@dataclass
class Hang:
    """What the ranks wait in: a collective of a group, with the entry of each rank that called it,
    or init_process_group, with the ranks that are in it."""

    group: tuple
    number: int
    entries: list
    joining: list

    @property
    def alike(self):
        """Whether all ranks that called the collective called the same."""
        return not are_different(self.entries)


def is_waiting(entry):
    """Whether a collective has not ended; gloo leaves "state" alone and sets "retired"."""
    return not entry["retired"] and entry["state"] != "completed"


def are_different(entries):
    """Whether the ranks called different collectives, or the same with shapes that do not fit."""
    names = [describe_call(entry) for entry in entries]
    if names and names[0].startswith(UNEVEN):
        names = [name.split()[0] for name in names]
    return len(set(names)) > 1


def find_first_stuck(notes, sound):
    """Returns (group, number) of the first collective in which a sound rank waits, or Nones.

    Where the ranks called different collectives under an earlier number, it is that number.
    """
    for group in sorted({group for rank in sound for group in notes[rank]["calls"]}):
        calls = {rank: note["calls"].get(group, {}) for rank, note in notes.items()}
        stuck = {
            number
            for rank in sound
            for number, entry in calls[rank].items()
            if is_waiting(entry) and notes[rank]["time"] - entry["time_created_ns"] / 1e9 > PATIENCE
        }
        for number in sorted(set().union(*calls.values())) if stuck else ():
            called = [numbers[number] for numbers in calls.values() if number in numbers]
            if number in stuck or are_different(called):
                return group, number
    return None, None


def find_hang(notes, sound):
    """Returns what the ranks wait in; sound are the ranks that run and write notes."""
    joining = [
        rank
        for rank in sound
        if "init_process_group" in [function for _, _, function, _ in notes[rank]["stack"]]
    ]
    group, number = find_first_stuck(notes, sound)
    calls = [note["calls"].get(group, {}) for note in notes.values()]
    return Hang(group, number, [c[number] for c in calls if number in c], joining)


# The words.


def name_ranks(ranks):
    """rank 1; ranks 0 and 2; ranks 0 to 6, 8 and 9."""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    names = " and ".join(", ".join(parts).rsplit(", ", 1))
    return f"ranks {names}" if len(ranks) > 1 else f"rank {names}"


def name_group(group):
    """Names a library and a process group, unless it is gloo's group of all ranks."""
    library, name = group
    if name == "0":
        return "" if library == "gloo" else f" of {library}"
    return f" of {'' if library == 'gloo' else library + ' in '}process group {name}"


def describe_call(entry):
    """Names a collective and its tensors: all_reduce (3 floats)."""
    side = "input" if entry["input_sizes"] else "output"
    pairs = zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
    tensors = [" x ".join(map(str, size or [1])) + f" {kind.lower()}s" for size, kind in pairs]
    name = entry["profiling_name"].partition(":")[2]
    return f"{name} ({' + '.join(tensors)})" if tensors else name


def describe_stack(stack, whole):
    """Says where a rank is in its own code: in the innermost call, or in all of them."""
    own = [frame for frame in stack if not INSTALLED.search(frame[0])] or stack
    lines = []
    for filename, line, function, code in reversed(own if whole else own[-1:]):
        filename = filename.removeprefix(f"{os.getcwd()}/")
        lines.append(f"at {function}, {filename}:{line}: {code.partition('  #')[0].strip()}")
    return "\n        ".join(lines)


def describe_problem(note, now, over, by_pids):
    """Says what is wrong with a rank's process; "" when it runs and writes notes."""
    if note is None:
        return MISSING[by_pids]
    if not note["running"]:
        return "has left the script: its output says whether it failed"
    process, silence = f"process {note['pid']} on {note['host']}", now - note["time"]
    if read_process_state(note) == "Z" and not over:
        return f"is dead: {process} is gone, and wrote no last note"
    if read_process_state(note) == "T":
        return f"is stopped: {process} goes on after kill -CONT {note['pid']}"
    if silence > PATIENCE:
        return f"has written no note for {silence:.0f} s: look at {process}"
    return ""


def describe_part(groups, hang):
    """Says what a rank has to do with a collective, from the collectives of its process groups."""
    calls, number = groups.get(hang.group, {}), hang.number
    if number in calls:
        name = "it" if hang.alike else describe_call(calls[number])
        return f"waits in {name}" if is_waiting(calls[number]) else f"has called {name} and gone on"
    for group, others in groups.items():
        for last, entry in others.items():
            if group != hang.group and is_waiting(entry):
                what = f"collective {last}{name_group(group)}, {describe_call(entry)}"
                return f"has not called it: it waits in {what}"
    if not calls:
        return f"has called no collective{name_group(hang.group)}"
    last = max(calls)
    if last > number:  # The recorder keeps the newest entries only.
        return "has gone on"
    return f"has not called it: the last one was collective {last}, {describe_call(calls[last])}"


def describe_hang(notes, hang, now):
    """Returns the first line of the report: what the ranks wait in, and for how long."""
    if hang.entries:
        what = describe_call(hang.entries[0]) if hang.alike else "not the same on all ranks"
        seconds = now - min(entry["time_created_ns"] for entry in hang.entries) / 1e9
        return f"collective {hang.number}{name_group(hang.group)}: {what}, for {seconds:.0f} s"
    if hang.joining:
        return "init_process_group: it ends when all ranks have called it"
    if any(note["calls"] for note in notes.values()):
        return f"no rank has waited in a collective for more than {PATIENCE} s"
    return "no collective is on record, only where the ranks are"


def describe_rank(rank, note, problem, hang, now, whole):
    """Returns (what the rank does, where it is)."""
    where = ""
    if note and note["running"]:
        # A stopped rank writes no note, but py-spy can look into it where it is installed.
        stack = read_stack(note["pid"]) if read_process_state(note) == "T" else []
        ago = f"{now - note['time']:.0f} s earlier " if problem and not stack else ""
        where = ago + describe_stack(stack or note["stack"], whole)
    if problem:
        return problem, where
    if hang.entries:
        return describe_part(note["calls"], hang), where
    if hang.joining:
        return "waits in it" if rank in hang.joining else "has not called it", where
    return "is", where


def write_lines(doing):
    """Returns the lines about the ranks, from {(what, where): ranks}; those that wait first."""
    lines = []
    for (what, where), ranks in sorted(doing.items(), key=lambda item: item[0][0][:5] != "waits"):
        verb, _, rest = what.partition(" ")
        if len(ranks) > 1:
            verb = {"is": "are", "has": "have", "waits": "wait"}[verb]
        lines.append(f"    {name_ranks(ranks)} {verb} {rest or where}")
        if rest and where:
            lines.append(f"        {where}")
    return lines


def report(notes, whole=False):
    """Returns what to print: what waits, then what each rank does, and where."""
    ranks = range(max(note["world_size"] for note in notes.values()))
    if len(notes) == len(ranks) and not any(note["running"] for note in notes.values()):
        return f"all {len(ranks)} ranks have left the script"
    now = max(note["time"] for note in notes.values())
    over = all(read_process_state(note) == "Z" for note in notes.values())
    by_pids = not any("recorder" in note for note in notes.values())
    problems = {rank: describe_problem(notes.get(rank), now, over, by_pids) for rank in ranks}
    hang = find_hang(notes, [rank for rank in ranks if not problems[rank]])
    doing = {}
    for rank in ranks:
        part = describe_rank(rank, notes.get(rank), problems[rank], hang, now, whole)
        doing.setdefault(part, []).append(rank)
    lines = [describe_hang(notes, hang, now), *write_lines(doing)]
    if time.time() - now > PATIENCE:
        lines.insert(0, f"the newest note is {time.time() - now:.0f} s old")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="who_hangs", help="default: who_hangs")
    parser.add_argument("--pids", type=int, nargs="*", metavar="PID", help="ask py-spy instead")
    parser.add_argument("--stacks", action="store_true", help="show all calls in your own code")
    args = parser.parse_args()
    if args.pids == []:
        sys.exit("--pids: no process has this name")  # pgrep has found none.
    notes = ask_py_spy(args.pids) if args.pids else read_notes(args.folder)
    if not notes:
        sys.exit(f"no note in {args.folder}: name the processes with --pids instead")
    print(report(notes, args.stacks))


if __name__ == "__main__":
    main()
