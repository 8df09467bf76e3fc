"Answers to the exercises of records: the course's, right ones of another style, and wrong ones."

import copy
import importlib.metadata
import json
import platform
import shutil
import sys
import tarfile

import torch

from course_lib import machine, records
from course_lib.records import solutions

differing, stale, suspects = solutions.differing, solutions.stale, solutions.suspects
REFERENCE = {n: tuple(getattr(solutions, name) for name in names) for n, names in solutions.EXERCISES.items()}


# --- records.1: a manifest, and what differs -------------------------------------------------


def with_other_commands(config, seed, git):
    "Right: the log, the short status, a longer diff, every package."
    here = git("log", "-1", "--format=%H")
    return {
        "config": json.loads(json.dumps(config)),
        "seed": seed,
        "commit": here,
        "clean": here and not git("status", "--short"),
        "diff": here and git("diff", "HEAD", "--binary", "--unified=9", "--no-color"),
        "packages": {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()},
        "device": machine.name(),
        "processor": machine.host(),
        "threads": torch.get_num_threads(),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def by_paths(then, now):
    "Right: one loop over a list of pairs that grows."
    names, todo = set(), [((), then, now)]
    for path, a, b in todo:
        for key in a.keys() | b.keys():
            if key not in a or key not in b:
                names.add(".".join([*path, key]))
            elif isinstance(a[key], dict) and isinstance(b[key], dict):
                todo.append(((*path, key), a[key], b[key]))
            elif (type(a[key]), a[key]) != (type(b[key]), b[key]):
                names.add(".".join([*path, key]))
    return sorted(names)


def in_steps(config, seed, git):
    "Right: verified commit; clean from the diff and the new files."
    out = {"seed": int(seed), "config": copy.deepcopy(config), "commit": git("rev-parse", "--verify", "HEAD")}
    changes = git("diff", "HEAD", "--full-index", "--binary")
    out["diff"] = changes + "\n" if changes else changes
    new = git("ls-files", "--others", "--exclude-standard")
    out["clean"] = None if new is None else not new and not out["diff"]
    out["packages"] = {
        "torch": importlib.metadata.version("torch"),
        "numpy": importlib.metadata.version("numpy"),
        "scikit-learn": importlib.metadata.version("scikit-learn"),
    }
    return out | {
        "python": platform.python_version(),
        "processor": machine.host(),
        "device": machine.name(),
        "threads": torch.get_num_threads(),
    }


def _with(**changes):
    def manifest(config, seed, git):
        return solutions.manifest(config, seed, git) | {k: f(config, git) for k, f in changes.items()}

    return manifest, differing


def _stages(config, git):
    return None if git("add", "--update") is None else git("diff", "--cached", "--binary")


only_unstaged_changes = _with(diff=lambda config, git: git("diff", "--binary"))
stages_what_somebody_is_working_on = _with(diff=_stages)
binary_files_left_out = _with(diff=lambda config, git: git("diff", "HEAD"))
the_newest_commit_of_all_branches = _with(commit=lambda config, git: git("log", "--all", "-1", "--format=%H"))
the_diff_without_blanks_at_its_end = _with(
    diff=lambda config, git: (git("diff", "HEAD", "--binary") or "").strip() if git("status") else None
)
deleted_files_left_out = _with(diff=lambda config, git: git("diff", "HEAD", "--binary", "--diff-filter=AM"))
clean_when_the_diff_is_empty = _with(clean=lambda config, git: git("diff", "HEAD") == "")
empty_diff_where_there_is_no_repository = _with(
    diff=lambda config, git: git("diff", "HEAD", "--binary") or ""
)
copies_the_config_one_level_deep = _with(config=lambda config, git: dict(config))


def _missing_is_none(then, now):
    names = []
    for key in {*then, *now}:
        a, b = then.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += [f"{key}.{name}" for name in _missing_is_none(a, b)]
        elif a != b or type(a) is not type(b):
            names.append(key)
    return sorted(names)


def _compares_as_text(then, now):
    return [n for n in differing(then, now) if _at(then, n) != _at(now, n)]


def _at(tree, name):
    for key in name.split("."):
        tree = tree.get(key, "missing")
    return str(tree)


missing_and_none_are_the_same = (solutions.manifest, _missing_is_none)
one_and_its_text_are_the_same = (solutions.manifest, _compares_as_text)

# --- records.2: run it again ------------------------------------------------------------------


def from_an_archive(found, git, folder):
    "Right: no worktree, the files of the commit from an archive."
    if not found["commit"] or git("cat-file", "-e", found["commit"]) is None:
        raise ValueError("unknown commit")
    folder.mkdir()
    git("archive", "--output", folder / "code.tar", found["commit"])
    with tarfile.open(folder / "code.tar") as tar:
        tar.extractall(folder, filter="data")
    if found["diff"] != "" and records.git(folder)("apply", input=f"{found['diff']}\n") is None:
        raise ValueError("the diff does not fit")
    return records.run_script(folder, found)


def from_a_clone(found, git, folder):
    "Right: a clone, which then goes to the commit."
    git("clone", "--quiet", ".", folder)
    there = records.git(folder)
    if found["commit"] is None or there("checkout", "--quiet", found["commit"]) is None:
        raise ValueError(found["commit"])
    if not found["clean"] and there("apply", "-", input=found["diff"] + "\n") is None and found["diff"]:
        raise ValueError("the diff does not fit")
    return records.run_script(folder, found)


def _rerun(found, git, folder, commit=None, diff=None):
    if found["commit"] is None or git("worktree", "add", folder, commit or found["commit"]) is None:
        raise ValueError("unknown commit")
    diff = found["diff"] + "\n" if diff is None else diff
    if diff and records.git(folder)("apply", input=diff) is None:
        raise ValueError("the diff does not fit")
    return records.run_script(folder, found)


def forgets_the_diff(found, git, folder):
    return _rerun(found, git, folder, diff="")


def applies_a_diff_without_its_last_line_break(found, git, folder):
    return _rerun(found, git, folder, diff=found["diff"])


def the_branch_in_place_of_the_commit(found, git, folder):
    git("cat-file", "-e", found["commit"] or "")
    return _rerun(found, git, folder, commit="HEAD")


def runs_a_commit_whose_diff_does_not_fit(found, git, folder):
    try:
        return _rerun(found, git, folder)
    except ValueError:
        if not folder.exists():
            raise
        return records.run_script(folder, found)


def stashes_and_puts_everything_back(found, git, folder):
    git("stash", "--include-untracked")
    try:
        return _rerun(found, git, folder)
    finally:
        git("stash", "pop", "--index")


def files_of_today_in_the_copy(found, git, folder):
    if found["commit"] is None or git("cat-file", "-e", found["commit"]) is None:
        raise ValueError("unknown commit")
    shutil.copytree(git("rev-parse", "--show-toplevel"), folder)
    there = records.git(folder)
    there("checkout", "--force", "--detach", found["commit"])
    if found["diff"] and there("apply", input=found["diff"] + "\n") is None:
        raise ValueError("the diff does not fit")
    return records.run_script(folder, found)


def runs_an_unknown_commit_as_it_is(found, git, folder):
    git("worktree", "add", folder, found["commit"] or "HEAD")
    if not (folder / "train.py").exists():
        git("worktree", "add", folder, "HEAD")
    if found["diff"] and records.git(folder)("apply", input=found["diff"] + "\n") is None:
        raise ValueError("the diff does not fit")
    return records.run_script(folder, found)


def stashes_when_it_gives_up(found, git, folder):
    try:
        return _rerun(found, git, folder)
    except ValueError:
        git("stash")
        raise


# --- records.3 and .4: cells ---------------------------------------------------------------------


def versions_as_tuples(history, notebook):
    "Right: tuples in tuples, compared by content."
    results = []
    for runs in (history, notebook):
        names, result = {}, {}
        for cell in runs:
            result[cell.id] = (cell.source, [(n, names.get(n)) for n in sorted(cell.uses)])
            for n in cell.defines:
                names[n] = result[cell.id]
        results.append(result)
    return {id for id, version in results[0].items() if id not in results[1] or results[1][id] != version}


def versions_as_digests(history, notebook):
    "Right: the library's digests."
    ran, would = ({s.cell.id: s.version for s in records.replay(runs)} for runs in (history, notebook))
    return frozenset(ran.items() - would.items() and {i for i, v in ran.items() if v != would.get(i)})


def _stale(of):
    "A wrong answer: the versions of cells by `of(cell, names)`, which also puts its names into `names`."

    def answer(history, notebook):
        found = []
        for runs in (history, notebook):
            names = {}
            found.append({cell.id: of(cell, names) for cell in runs})
        return {id for id in found[0] if found[0][id] != found[1].get(id)}

    return answer


def _version(cell, names, source=None, defines=None, kept=None):
    source = cell.source if source is None else source
    version = (source, tuple((n, names.get(n)) for n in sorted(cell.uses)))
    names |= dict.fromkeys(cell.defines if defines is None else defines, version if kept is None else kept)
    return version


one_step_back_only = _stale(lambda cell, names: _version(cell, names, kept=cell.source))
the_id_is_part_of_the_version = _stale(
    lambda cell, names: _version(cell, names, source=cell.id + cell.source)
)
the_first_line_of_the_source = _stale(
    lambda cell, names: _version(cell, names, source=cell.source.splitlines()[0])
)
by_id_in_place_of_source = _stale(lambda cell, names: _version(cell, names, source=cell.id))
the_first_letters_of_the_source = _stale(lambda cell, names: _version(cell, names, source=cell.source[:8]))
one_name_a_cell = _stale(lambda cell, names: _version(cell, names, defines=sorted(cell.defines)[:1]))


def six_steps_back(history, notebook):
    def cut(version, steps):
        if not isinstance(version, tuple):
            return version
        return version[0], tuple((n, cut(v, steps - 1)) for n, v in version[1] if steps)

    return _stale(lambda cell, names: cut(_version(cell, names), 6))(history, notebook)


def cells_that_define_nothing_are_never_stale(history, notebook):
    return stale(history, notebook) & {c.id for c in history if c.defines}


def runs_before(history, notebook):
    "Right: the version of each name by looking back for its last maker."

    def version(runs, i):
        return runs[i].source, [look(runs, i, n) for n in sorted(runs[i].uses)]

    def look(runs, i, name):
        made = [k for k in range(i) if name in runs[k].defines]
        return version(runs, made[-1]) if made else None

    at = [i for i, c in enumerate(notebook) if c.id == history[-1].id]
    last = len(history) - 1
    return sorted(n for n in history[-1].uses if at and look(history, last, n) != look(notebook, at[0], n))


def stopped_at_the_cell(history, notebook):
    "Right: versions of the names after all runs before the last, and after the page above its cell."
    *runs, last = history
    if last.id not in [c.id for c in notebook]:
        return []
    above = notebook[: [c.id for c in notebook].index(last.id)]
    had, would = ({n: s.version for s in records.replay(r) for n in s.cell.defines} for r in (runs, above))
    return [n for n in sorted(last.uses) if had.get(n, "") != would.get(n, "")]


def names_of_all_stale_cells(history, notebook):
    wrong = stale(history, notebook)
    return sorted({n for c in history if c.id in wrong for n in c.defines} & history[-1].uses)


def _ends(runs):
    return {n: s.version for s in records.replay(runs) for n in s.cell.defines}


def versions_at_the_end(history, notebook):
    if history[-1].id not in {c.id for c in notebook}:
        return []
    had, would = _ends(history[:-1]), _ends(notebook)
    return sorted(n for n in history[-1].uses if had.get(n) != would.get(n))


def only_names_that_both_know(history, notebook):
    at = [i for i, c in enumerate(notebook) if c.id == history[-1].id]
    had, would = _ends(history[:-1]), _ends(notebook[: at[0]]) if at else {}
    return sorted(n for n in history[-1].uses & had.keys() & would.keys() if had[n] != would[n])


def names_that_nobody_had_are_fine(history, notebook):
    had = _ends(history[:-1])
    return [n for n in suspects(history, notebook) if n in had]


def names_that_the_page_uses(history, notebook):
    now = {c.id: c for c in notebook}.get(history[-1].id, history[-1])
    return suspects([*history[:-1], now], notebook)


def a_deleted_cell_distrusts_all(history, notebook):
    gone = history[-1].id not in {c.id for c in notebook}
    return sorted(history[-1].uses) if gone else suspects(history, notebook)


RIGHT = {
    "records.1": [(with_other_commands, by_paths), (in_steps, by_paths)],
    "records.2": [from_an_archive, from_a_clone],
    "records.3": [versions_as_tuples, versions_as_digests],
    "records.4": [runs_before, stopped_at_the_cell],
}
MUTANTS = {
    "records.1": [
        only_unstaged_changes,
        stages_what_somebody_is_working_on,
        binary_files_left_out,
        the_diff_without_blanks_at_its_end,
        deleted_files_left_out,
        the_newest_commit_of_all_branches,
        clean_when_the_diff_is_empty,
        empty_diff_where_there_is_no_repository,
        copies_the_config_one_level_deep,
        missing_and_none_are_the_same,
        one_and_its_text_are_the_same,
    ],
    "records.2": [
        forgets_the_diff,
        applies_a_diff_without_its_last_line_break,
        the_branch_in_place_of_the_commit,
        runs_a_commit_whose_diff_does_not_fit,
        stashes_and_puts_everything_back,
        files_of_today_in_the_copy,
        runs_an_unknown_commit_as_it_is,
        stashes_when_it_gives_up,
    ],
    "records.3": [
        one_step_back_only,
        by_id_in_place_of_source,
        the_id_is_part_of_the_version,
        the_first_line_of_the_source,
        six_steps_back,
        the_first_letters_of_the_source,
        one_name_a_cell,
        cells_that_define_nothing_are_never_stale,
    ],
    "records.4": [
        names_of_all_stale_cells,
        versions_at_the_end,
        only_names_that_both_know,
        names_that_nobody_had_are_fine,
        names_that_the_page_uses,
        a_deleted_cell_distrusts_all,
    ],
}
