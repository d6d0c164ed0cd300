"""Says in words which rank of a training run hangs, and where.

    python scripts/who_hangs.py who_hangs     # the folder with the ranks' notes

Ranks write notes when their script has the lines that docs/troubleshooting.md names under "Who
hangs?". A note holds the stack of the rank's main thread, and the entries of torch's flight
recorder: the collectives that the rank has called, of gloo and of nccl. The entries come from
private functions of torch 2.8 and newer.

torchfrtrace, which comes with torch, compares such entries, too. With gloo's it ended with
KeyError: ('0', 0), and it has no line for a rank that is outside of all collectives.
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

PATIENCE = 12  # A rank writes every 5 seconds. After 12 without a note, or in a wait, it counts.
HERE = os.uname().nodename
# In these files is no code of the user: installed packages, Python's own modules, and our notes.
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<|/check_ddp\.py$")
UNEVEN = ("gather", "scatter", "alltoall", "all_to_all")  # Shapes may differ between their ranks.


def read_calls(recorders):
    """Returns a note's collectives, by library and process group, and then by number."""
    calls = {}
    for text in recorders:  # one for each library that has a recorder of its own
        for entry in json.loads(text).get("entries", ()):
            if not entry["is_p2p"]:
                # gloo and nccl count their collectives apart, also in one process group.
                library = entry["profiling_name"].partition(":")[0].replace("nccl2", "nccl")
                group = calls.setdefault((library, entry["process_group"][0]), {})
                group[entry["collective_seq_id"]] = entry
    return calls


def read_notes(folder):
    """Returns the notes of a run, by rank."""
    notes = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {note["rank"]: note | {"calls": read_calls(note["recorder"])} for note in notes}


def read_state(note):
    """Returns the letter that ps shows for a process: T if stopped, "" if gone, ? if elsewhere."""
    if note["host"] != HERE:
        return "?"
    stat = Path(f"/proc/{note['pid']}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""


def is_waiting(entry):
    """Whether a collective has not ended; gloo leaves "state" alone and sets "retired"."""
    return not entry["retired"] and entry["state"] != "completed"


def describe_call(entry):
    """Names a collective and its tensors: all_reduce (3 floats)."""
    side = "input" if entry["input_sizes"] else "output"
    pairs = zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
    tensors = [" x ".join(map(str, size or [1])) + f" {kind.lower()}s" for size, kind in pairs]
    name = entry["profiling_name"].partition(":")[2]
    return f"{name} ({' + '.join(tensors)})" if tensors else name


def are_different(entries):
    """Whether the ranks called different collectives, or the same with shapes that do not fit."""
    names = [describe_call(entry) for entry in entries]
    if names and names[0].startswith(UNEVEN):
        names = [name.split()[0] for name in names]
    return len(set(names)) > 1


def find_hang(notes, sound):
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


def name_ranks(ranks):
    """rank 1; ranks 0 and 2; ranks 0 to 6, 8 and 9."""
    first = [rank for rank in ranks if rank - 1 not in ranks]
    last = [rank for rank in ranks if rank + 1 not in ranks]
    parts = []
    for start, end in zip(first, last, strict=True):
        parts += [f"{start} to {end}"] if end > start + 1 else map(str, range(start, end + 1))
    names = " and ".join(", ".join(parts).rsplit(", ", 1))
    return f"ranks {names}" if len(ranks) > 1 else f"rank {names}"


def name_group(group):
    """Names a library and a process group, unless it is gloo's group of all ranks."""
    library, name = group
    names = [] if library == "gloo" else [f" {library}"]
    names += [] if name == "0" else [f" process group {name}"]
    return " of" + " in".join(names) if names else ""


def describe_place(stack):
    """Says where a rank is in its own code."""
    own = [frame for frame in stack if not INSTALLED.search(frame[0])] or stack
    filename, line, function, code = own[-1]
    filename = filename.removeprefix(f"{os.getcwd()}/")
    return f"at {function}, {filename}:{line}: {code.partition('  #')[0].strip()}"


def is_dead(note):
    """Whether a rank's process is gone, although its script had not ended."""
    return note["running"] and read_state(note) in ("", "Z")


def describe_problem(note, now, was_killed):
    """Says what is wrong with a rank's process; "" when it runs and writes notes."""
    process, silence = f"process {note['pid']} on {note['host']}", now - note["time"]
    if not note["running"]:
        return "has left the script: its output says whether it failed"
    if is_dead(note) and not was_killed:
        return "has died: its output says why"
    if read_state(note) == "T":
        return f"is stopped: {process} goes on after kill -CONT {note['pid']}"
    if silence > PATIENCE:
        return f"has written no note for {silence:.0f} s: look at {process}"
    return ""


def describe_part(groups, group, number, alike):
    """Says what a rank has to do with a collective, from the collectives of its process groups."""
    calls = groups.get(group, {})
    if number in calls:
        name = "it" if alike else describe_call(calls[number])
        return f"waits in {name}" if is_waiting(calls[number]) else f"has called {name} and gone on"
    for other, others in groups.items():
        for last, entry in others.items():
            if other != group and is_waiting(entry):
                what = f"collective {last}{name_group(other)}, {describe_call(entry)}"
                return f"has not called it: it waits in {what}"
    if not calls:
        return f"has called no collective{name_group(group)}"
    last = max(calls)
    if last > number:  # The recorder keeps the newest entries only.
        return "has gone on"
    return f"has not called it: the last one was collective {last}, {describe_call(calls[last])}"


def report(notes):
    """Returns what to print: what waits, then what each rank does, and where."""
    ranks = range(max(note["world_size"] for note in notes.values()))
    if len(notes) == len(ranks) and not any(note["running"] for note in notes.values()):
        return f"all {len(ranks)} ranks have left the script"
    now = max(note["time"] for note in notes.values())
    was_killed = all(map(is_dead, notes.values()))  # The notes say what they did before.
    problems = {rank: describe_problem(note, now, was_killed) for rank, note in notes.items()}
    sound = [rank for rank, problem in problems.items() if not problem]
    joining = {r for r in sound if any("init_process_group" in f for f in notes[r]["stack"])}
    group, number = find_hang(notes, sound)
    calls = [note["calls"].get(group, {}) for note in notes.values()]
    entries = [numbers[number] for numbers in calls if number in numbers]
    alike = not are_different(entries)
    if entries:
        what = describe_call(entries[0]) if alike else "not the same on all ranks"
        seconds = now - min(entry["time_created_ns"] for entry in entries) / 1e9
        title = f"collective {number}{name_group(group)}: {what}, for {seconds:.0f} s"
    elif joining:
        title = "init_process_group: it ends when all ranks have called it"
    else:
        title = f"no rank has waited in a collective for more than {PATIENCE} s"

    doing = {}  # {(what they do, where): ranks}
    for rank in ranks:
        note, where = notes.get(rank), ""
        if note is None:
            what = "has written no note: it was not started, or did not come to the lines"
        else:
            what = problems[rank]
            if note["running"]:
                silence = round(now - note["time"])
                ago = f"{silence} s earlier " if what and silence else ""
                where = ago + describe_place(note["stack"])
            if not what and entries:
                what = describe_part(note["calls"], group, number, alike)
            elif not what and joining:
                what = "waits in it" if rank in joining else "has not called it"
        doing.setdefault((what or "is", where), []).append(rank)
    lines = [title]
    for (what, where), those in sorted(doing.items(), key=lambda item: item[0][0][:5] != "waits"):
        verb, _, rest = what.partition(" ")
        if len(those) > 1:
            verb = {"is": "are", "has": "have", "waits": "wait"}[verb]
        lines.append(f"    {name_ranks(those)} {verb} {rest or where}")
        if rest and where:
            lines.append(f"        {where}")
    if was_killed:
        lines.insert(0, "no rank runs any more: this is from before they ended")
    if time.time() - now > PATIENCE:
        lines.insert(0, f"the newest note is {time.time() - now:.0f} s old")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="who_hangs", help="default: who_hangs")
    args = parser.parse_args()
    notes = read_notes(args.folder)
    if not notes:
        sys.exit(f"no note in {args.folder}: py-spy sees running processes without notes")
    print(report(notes))


if __name__ == "__main__":
    main()
