"""Says in words which rank of a training run hangs, and where.

    python scripts/who_hangs.py who_hangs                        # a folder with the ranks' notes
    python scripts/who_hangs.py --pids $(pgrep -f train.py)      # running processes, with py-spy

Ranks write notes when their script has the lines that docs/troubleshooting.md shows under "Who
hangs?". A note holds the stack of the rank's main thread, and the entries of torch's flight
recorder: the collectives that the rank has called. The entries come from a private function of
torch, which knows gloo since torch 2.8. With --pids there are stacks alone, and the processes must
be ranks of one run on this machine.
"""

import argparse
import json
import linecache
import os
import re
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 12  # A rank writes every 5 seconds. After 12 without a note, or in a wait, it counts.
HERE = os.uname().nodename
# In these files is no code of the user: installed packages and Python's own modules.
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<")
UNEVEN = ("gather", "scatter", "alltoall", "all_to_all")  # Shapes may differ between their ranks.


def read_notes(folder):
    """Returns the notes of the newest run, by rank."""
    notes = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    for note in notes:
        note["calls"] = {}  # for each process group: its collectives by their numbers
        for entry in json.loads(note["recorder"]).get("entries", ()):
            if not entry["is_p2p"]:
                calls = note["calls"].setdefault(entry["process_group"][0], {})
                calls[entry["collective_seq_id"]] = entry
    newest = max(notes, key=lambda note: note["time"], default={})
    return {note["rank"]: note for note in notes if note["rank"] < newest["world_size"]}


def ask_py_spy(pids):
    """Returns notes with stacks alone, by rank, of processes on this machine."""
    settings = {}
    for pid in sorted(pids):
        try:
            environ = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        except OSError:  # The process has ended, or belongs to somebody else.
            continue
        settings[pid] = dict(re.findall(r"(\w+)=([^\0]*)", environ))
    names = ("RANK", "WORLD_SIZE")
    if not any("RANK" in env for env in settings.values()):
        names = ("SLURM_PROCID", "SLURM_NTASKS")
    notes = {}
    for pid, env in settings.items():
        rank, world_size = (int(env.get(name, -1)) for name in names)
        stack = stack_of(pid) if rank >= 0 and rank not in notes else []
        if stack:  # It is no launcher, no shell, and no worker of a data loader.
            notes[rank] = {"rank": rank, "world_size": world_size, "host": HERE, "pid": pid}
            notes[rank] |= {"time": time.time(), "running": True, "stack": stack, "calls": {}}
    return notes


def stack_of(pid):
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


def place(stack, whole):
    """Says where a rank is in its own code: in the innermost call, or in all of them."""
    own = [frame for frame in stack if not INSTALLED.search(frame[0])] or stack
    lines = []
    for filename, line, function, code in reversed(own if whole else own[-1:]):
        filename = filename.removeprefix(f"{os.getcwd()}/")
        lines.append(f"at {function}, {filename}:{line}: {code.partition('  #')[0].strip()}")
    return "\n        ".join(lines)


def process_state(note):
    """Returns the letter that ps shows: T for stopped, Z for gone; "" on another machine."""
    if note["host"] != HERE:
        return ""
    try:
        return Path(f"/proc/{note['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def trouble(note, now, over):
    """Says what is wrong with a rank's process; "" when it runs and writes notes."""
    if note is None:
        return "has written no note: it was not started, or did not come to the lines"
    if not note["running"]:
        return "has left the script: its output says whether it failed"
    process, silence = f"process {note['pid']} on {note['host']}", now - note["time"]
    if process_state(note) == "Z" and not over:
        return f"is dead: {process} is gone, and wrote no last note"
    if process_state(note) == "T":
        return f"is stopped: {process} goes on after kill -CONT {note['pid']}"
    if silence > PATIENCE:
        return f"has written no note for {silence:.0f} s: look at {process}"
    return ""


def describe(entry):
    """Names a collective and its tensors: all_reduce (3 floats)."""
    side = "input" if entry["input_sizes"] else "output"
    pairs = zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
    tensors = [" x ".join(map(str, size or [1])) + f" {kind.lower()}s" for size, kind in pairs]
    name = entry["profiling_name"].partition(":")[2]
    return f"{name} ({' + '.join(tensors)})" if tensors else name


def waits(entry):
    """Whether a collective has not ended; gloo leaves "state" alone and sets "retired"."""
    return not entry["retired"] and entry["state"] != "completed"


def differ(entries):
    """Whether the ranks called different collectives, or the same with shapes that do not fit."""
    words = [describe(entry) for entry in entries]
    if words[0].startswith(UNEVEN):
        words = [word.split()[0] for word in words]
    return len(set(words)) > 1


def first_stuck(notes, sound):
    """Returns (process group, number) of the first collective in which a sound rank waits.

    Where the ranks called different collectives under an earlier number, it is that number.
    """
    for group in sorted({group for rank in sound for group in notes[rank]["calls"]}):
        calls = {rank: note["calls"].get(group, {}) for rank, note in notes.items()}
        stuck = {
            number
            for rank in sound
            for number, entry in calls[rank].items()
            if waits(entry) and notes[rank]["time"] - entry["time_created_ns"] / 1e9 > PATIENCE
        }
        for number in sorted(set().union(*calls.values())) if stuck else ():
            if number in stuck or differ([c[number] for c in calls.values() if number in c]):
                return group, number
    return None, None


def of(group):
    """Names a process group, unless it is that of all ranks."""
    return "" if group == "0" else f" of process group {group}"


def about(groups, group, number, alike):
    """Says what a rank has to do with a collective, from the collectives of its process groups."""
    calls = groups.get(group, {})
    if number in calls:
        it = "it" if alike else describe(calls[number])
        return f"waits in {it}" if waits(calls[number]) else f"has called {it} and gone on"
    for other, others in groups.items():
        for last, entry in others.items():
            if other != group and waits(entry):
                what = f"collective {last}{of(other)}, {describe(entry)}"
                return f"has not called it: it waits in {what}"
    if not calls:
        return f"has called no collective{of(group)}"
    last = max(calls)
    if last > number:  # The recorder keeps the newest entries only.
        return "has gone on"
    return f"has not called it: the last one was collective {last}, {describe(calls[last])}"


def names(ranks):
    """rank 1; ranks 0 and 2; ranks 0 to 6, 8 and 9."""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    words = " and ".join(", ".join(words).rsplit(", ", 1))
    return f"ranks {words}" if len(ranks) > 1 else f"rank {words}"


def report(notes, stacks=False):
    """Returns what to print: what waits, then what each rank does, and where."""
    ranks = range(max(note["world_size"] for note in notes.values()))
    if len(notes) == len(ranks) and not any(note["running"] for note in notes.values()):
        return f"all {len(ranks)} ranks have left the script"
    now = max(note["time"] for note in notes.values())
    over = all(process_state(note) == "Z" for note in notes.values())
    wrong = {rank: trouble(notes.get(rank), now, over) for rank in ranks}
    sound = [rank for rank in ranks if not wrong[rank]]
    joining = [r for r in sound if "init_process_group" in [f[2] for f in notes[r]["stack"]]]
    group, number = first_stuck(notes, sound)
    calls = [note["calls"].get(group, {}) for note in notes.values()]
    entries = [numbers[number] for numbers in calls if number in numbers]
    alike = not entries or not differ(entries)
    if entries:
        what = describe(entries[0]) if alike else "not the same on all ranks"
        seconds = now - min(entry["time_created_ns"] for entry in entries) / 1e9
        lines = [f"collective {number}{of(group)}: {what}, for {seconds:.0f} s"]
    elif joining:
        lines = ["init_process_group: it ends when all ranks have called it"]
    elif any(note["calls"] for note in notes.values()):
        lines = [f"no rank has waited in a collective for more than {PATIENCE} s"]
    else:
        lines = ["no collective is on record, only where the ranks are"]
    if time.time() - now > PATIENCE:
        lines.insert(0, f"the newest note is {time.time() - now:.0f} s old")

    doing = {}  # (what, where): the ranks of which this can be said
    for rank in ranks:
        note, what, where = notes.get(rank), wrong[rank], ""
        if note and note["running"]:
            # A stopped rank writes no note, but py-spy can look into it where it is installed.
            stack = stack_of(note["pid"]) if process_state(note) == "T" else []
            ago = f"{now - note['time']:.0f} s earlier " if what and not stack else ""
            where = ago + place(stack or note["stack"], stacks)
        if not what and entries:
            what = about(note["calls"], group, number, alike)
        elif not what and joining:
            what = "waits in it" if rank in joining else "has not called it"
        doing.setdefault((what or "is", where), []).append(rank)
    for (what, where), those in sorted(doing.items(), key=lambda item: item[0][0][:5] != "waits"):
        verb, _, rest = what.partition(" ")
        if len(those) > 1:
            verb = {"is": "are", "has": "have", "waits": "wait"}[verb]
        lines.append(f"    {names(those)} {verb} {rest or where}")
        if rest and where:
            lines.append(f"        {where}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="who_hangs", help="default: who_hangs")
    parser.add_argument("--pids", type=int, nargs="+", metavar="PID", help="ask py-spy instead")
    parser.add_argument("--stacks", action="store_true", help="show all calls in your own code")
    args = parser.parse_args()
    notes = ask_py_spy(args.pids) if args.pids else read_notes(args.folder)
    if not notes:
        no_rank = "no process with RANK or SLURM_PROCID in its environment that py-spy can read"
        sys.exit(no_rank if args.pids else f"no note in {args.folder}")
    print(report(notes, args.stacks))


if __name__ == "__main__":
    main()
