import json
import math
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from course_lib import machine, recorded, reproduce
from course_lib.reproduce import ManifestError
from course_lib.reproduce import code as reproduce_code
from course_lib.reproduce import comparison as reproduce_compare
from course_lib.reproduce import determinism as reproduce_determinism
from course_lib.reproduce import figures as reproduce_figures
from course_lib.reproduce import hogwild as reproduce_hogwild
from course_lib.reproduce import manifest as reproduce_manifest
from course_lib.reproduce import runs as reproduce_runs
from course_lib.reproduce import seeding as reproduce_seeding
from course_lib.reproduce import sums as reproduce_sums

# --- seeding ------------------------------------------------------------------------


def draw():
    return random.random(), np.random.rand(), torch.rand(2).tolist()


def test_a_seed_fixes_every_generator_and_a_block_puts_them_back():
    reproduce.seed_everything(3)
    first = draw()
    reproduce.seed_everything(3)
    before = draw()
    assert before == first
    reproduce.seed_everything(3)
    with reproduce.seeded(8):
        draw()
        torch.manual_seed(0)
    assert draw() == first


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "1", None])
def test_a_seed_out_of_numpys_range_is_refused(seed):
    with pytest.raises(ValueError, match="expected a whole number from 0 to 4294967295"):
        reproduce.seed_everything(seed)


class Noisy(torch.utils.data.Dataset):
    "Each item is a random number: of the data set's own generator, or of the sample's."

    def __init__(self, own):
        self.own, self.rng = own, np.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.rng.random() if self.own else reproduce.sample_rng(5, 0, i).random()


def load(own, workers, **options):
    loader = torch.utils.data.DataLoader(Noisy(own), batch_size=2, num_workers=workers, **options)
    return [x for batch in loader for x in batch.tolist()]


def test_workers_copy_the_data_sets_generator_and_the_options_part_them():
    copied = load(True, 2)
    assert copied[:2] == copied[2:4]  # the first batches of two workers: the same numbers
    first = load(True, 2, **reproduce.loader_options(1))
    assert len(set(first)) == len(first)
    torch.rand(5)  # what was drawn before does not matter
    assert load(True, 2, **reproduce.loader_options(1)) == first
    assert load(True, 2, **reproduce.loader_options(2)) != first


def test_a_samples_own_generator_does_not_see_how_many_workers_there_are():
    assert load(False, 0) == load(False, 2) == [reproduce.sample_rng(5, 0, i).random() for i in range(8)]


def test_a_loaders_order_depends_on_its_own_seed_alone():
    def order():
        options = reproduce.loader_options(4)
        return [int(i) for i in torch.utils.data.DataLoader(range(20), shuffle=True, **options)]

    first = order()
    torch.rand(9)
    assert order() == first != list(range(20))


# --- runs that are repeated ---------------------------------------------------------

TRAINING = """
import random
import numpy as np
import torch
from course_lib import reproduce


def train(config):
    x = torch.linspace(-1, 1, 40)
    reproduce.uses("a line", x)
    w = torch.randn(3, requires_grad=True)
    losses = []
    for _ in range(config["steps"]):
        noise = random.random() * np.random.rand()
        loss = ((w[0] + w[1] * x + w[2] * x**2 - x.exp()) ** 2).mean() + 0 * noise
        (grad,) = torch.autograd.grad(loss, w)
        w = (w - config["lr"] * grad).detach().requires_grad_()
        losses.append(loss.item())
    return {"losses": torch.tensor(losses), "w": w, "last": losses[-1], "name": "line", "none": None}


def broken(config):
    raise RuntimeError("out of paper")


def untensor(config):
    return {"model": torch.nn.Linear(1, 1)}


def sleeps(config):
    import time
    time.sleep(config["seconds"])
    return 0
"""
CONFIG = {"lr": 0.1, "steps": 5, "sizes": [1, 2], "note": None}


@pytest.fixture
def training(tmp_path, monkeypatch):
    "A module `training_<n>` of its own folder, which is no repository."
    folder = tmp_path / "code"
    folder.mkdir()
    name = f"training_{random.getrandbits(40)}"
    (folder / f"{name}.py").write_text(TRAINING)
    monkeypatch.syspath_prepend(str(folder))
    module = __import__(name)
    yield module
    del sys.modules[name]


def test_a_run_is_repeated_bit_for_bit_here_and_in_a_fresh_process(training, tmp_path):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    run = reproduce.run(training.train, CONFIG, seed=7, folder=tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers are untouched
    assert sorted(p.name for p in run.folder.iterdir()) == ["manifest.json", "result.pt"]
    assert run.manifest == reproduce.load(run.folder) == reproduce.load(run.folder / "manifest.json")
    torch.rand(3)
    for again in (reproduce.rerun(run.folder), reproduce.rerun(run.manifest)):
        assert again.same and again.differences == [] and again.results == []
    fresh = reproduce.rerun(run.folder, fresh=True, timeout=120)
    assert fresh.same and fresh.differences == []
    assert str(fresh) == "the same result, bit for bit\nnothing that the manifest names has changed"


def test_a_manifest_holds_what_a_run_depends_on(training, tmp_path):
    m = reproduce.run(training.train, CONFIG, seed=7, folder=tmp_path / "run").manifest
    assert m["function"] == f"{training.__name__}:train" and m["config"] == CONFIG and m["seed"] == 7
    assert m["packages"]["torch"] and m["packages"]["numpy"] == np.__version__
    assert m["settings"]["threads"] == torch.get_num_threads() and m["machine"]["device"] == machine.name()
    assert list(m["data"]) == ["a line"] and list(m["sources"]) == [training.__name__]
    assert m["repository"] == "no repository" and m["commit"] is m["clean"] is m["diff"] is None
    assert set(m["result"]) == {"losses", "w", "last", "name", "none"}


def test_a_manifest_keeps_the_configuration_as_it_was(training, tmp_path):
    config = json.loads(json.dumps(CONFIG))
    run = reproduce.run(training.train, config, folder=tmp_path / "run")
    config["sizes"].append(9)
    assert run.manifest["config"] == CONFIG


def test_everything_that_differs_is_named(training, tmp_path):
    run = reproduce.run(training.train, CONFIG, folder=tmp_path / "run")
    m = reproduce.load(run.folder)
    m["packages"]["torch"] = "1.0"
    m["packages"]["gone"] = "3"
    m["machine"]["device"] = "NVIDIA H200"
    m["python"] = "3.0.0"
    m["config"]["lr"] = 0.2
    m["data"]["a line"] = "0" * 16
    m["sources"][training.__name__] = "0" * 16
    m["settings"]["threads"] = torch.get_num_threads() + 1
    reproduce.save(m, run.folder / "manifest.json")
    threads = torch.get_num_threads()
    again = reproduce.rerun(run.folder)
    assert torch.get_num_threads() == threads
    assert not again.same
    own = f"sources.{training.__name__}"
    names = ["data.a line", "machine.device", "packages.torch", "packages.gone", "python", own]
    assert sorted(d.name for d in again.differences) == sorted(names)
    assert [d.name for d in again.differences][-2:] == ["packages.torch", "packages.gone"]
    text = str(again)
    assert "losses: 4 of 5 values differ, first at [1] (" in text
    assert "packages.gone: 3 then, nothing now" in text and "machine.device: NVIDIA H200 then" in text
    assert "by " in text and "last: " in text and "name" not in "".join(again.results)


def test_without_the_kept_result_the_verdict_stays(training, tmp_path):
    run = reproduce.run(training.train, CONFIG, folder=tmp_path / "run")
    m = reproduce.load(run.folder)
    m["seed"] = 1
    reproduce.save(m, run.folder / "manifest.json")
    (run.folder / "result.pt").write_bytes(b"not a tensor")
    assert "losses: other bits" in str(reproduce.rerun(run.folder))
    assert reproduce.rerun(run.folder, fresh=True, timeout=120).same is False


def test_threads_and_dtype_come_from_the_manifest_and_go_back(training, tmp_path):
    m = reproduce.run(training.train, CONFIG, folder=tmp_path / "run").manifest
    before = reproduce_manifest.settings()
    m["settings"]["dtype"] = "float64"
    again = reproduce.rerun(m)
    assert not again.same and "settings.dtype" not in [d.name for d in again.differences]
    assert reproduce_manifest.settings() == before


def test_the_shells_command_says_what_a_rerun_says(training, tmp_path, capsys):
    run = reproduce.run(training.train, CONFIG, folder=tmp_path / "run")
    assert reproduce.main([str(run.folder)]) == 0
    assert "the same result" in capsys.readouterr().out
    (run.folder / "manifest.json").write_text("{}")
    assert reproduce.main([str(run.folder)]) == 2
    assert "is not a manifest" in capsys.readouterr().err
    assert reproduce.main([]) == 2


def test_a_runs_default_folder_is_new_each_time(training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = (reproduce.run(training.train, CONFIG).folder for _ in range(2))
    assert one != two and one.parent.name == "runs"
    with pytest.raises(ManifestError, match="already holds a run"):
        reproduce.run(training.train, CONFIG, folder=one)


def test_determinism_is_asked_for_recorded_and_put_back(training, tmp_path):
    run = reproduce.run(training.train, CONFIG, folder=tmp_path / "run", deterministic=True)
    assert run.manifest["settings"]["deterministic"] is True
    assert not torch.are_deterministic_algorithms_enabled()
    assert reproduce.rerun(run.folder).same and not torch.are_deterministic_algorithms_enabled()


def test_the_lessons_training_run_repeats_itself(tmp_path):
    config = {"lr": 0.1, "batch": 128, "epochs": 1, "width": 4}
    run = reproduce.run(reproduce_runs.digits, config, folder=tmp_path / "run")
    assert reproduce.rerun(run.folder).same
    assert len(run.result["losses"]) == math.ceil(1397 / 128)
    assert next(iter(run.manifest["data"])).startswith("UCI Optical")
    with pytest.raises(ValueError, match="digits takes"):
        reproduce_runs.digits({"lr": 1})


# --- what can't be run or read ------------------------------------------------------


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text and error.value._render_traceback_() == [text]
    return text


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lr": torch.tensor(0.1)}, r"config\['lr'\] is a Tensor; a configuration holds text"),
        ({"model": {"act": torch.relu}}, r"config\['model'\]\['act'\] is a builtin"),
        ({"sizes": (1, 2)}, r"config\['sizes'\] is a tuple, which JSON gives back as a list"),
        ({"a": [1, {2: 3}]}, r"config\['a'\]\[1\] has the key 2; JSON's keys are text"),
        ({"lr": math.nan}, r"config\['lr'\] is nan, which JSON can't hold"),
        ({"n": np.float64(1)}, r"config\['n'\] is a float64"),
        ([1], "the configuration is a list; expected a dict"),
    ],
)
def test_a_configuration_that_is_not_json_is_refused_by_entry(training, tmp_path, config, says):
    with pytest.raises(ManifestError, match=says) as e:
        reproduce.run(training.train, config, folder=tmp_path / "run")
    one_sentence(e)
    assert not (tmp_path / "run").exists()


def test_a_function_that_no_process_can_import_is_refused(training, tmp_path):
    def inner(config):
        return 0

    notebook = type(inner)(inner.__code__, {}, "train")
    notebook.__module__, notebook.__qualname__ = "__main__", "train"
    for fn, says in [
        (inner, "inner is defined inside another function"),
        (lambda config: 0, "<lambda> is defined inside"),
        (notebook, "train is defined in this notebook or script.* move it to the top level of a .py file"),
        (print, "given a builtin_function_or_method"),
        (f"{training.__name__}", "expected 'module:function'"),
        ("no_such_module:train", "no_such_module can't be imported here"),
        (f"{training.__name__}:gone", "has no gone: the code has changed"),
        (f"{training.__name__}:np", "is a module, not a function"),
    ]:
        with pytest.raises(ManifestError, match=says) as e:
            reproduce.run(fn, {}, folder=tmp_path / "run")
        one_sentence(e)


def test_a_result_without_bits_is_refused_by_name(training, tmp_path):
    with pytest.raises(ManifestError, match=r"model is a Linear: return tensors.*state_dict"):
        reproduce.run(training.untensor, {}, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_leaves_nothing_and_keeps_the_settings(training, tmp_path):
    before = reproduce_manifest.settings()
    with pytest.raises(RuntimeError, match="out of paper"):
        reproduce.run(training.broken, {}, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists() and reproduce_manifest.settings() == before
    assert reproduce._data is None


@pytest.fixture
def saved(training, tmp_path):
    return reproduce.run(training.train, CONFIG, folder=tmp_path / "run").folder / "manifest.json"


def test_damaged_manifests_are_refused_in_one_sentence(saved, tmp_path):
    whole = saved.read_text()
    m = json.loads(whole)

    def written(**changes):
        return json.dumps({k: v for k, v in (m | changes).items() if v != "drop"})

    for text, says in [
        (
            written(schema=2),
            "has schema 2, from a newer library, and this one reads up to 1: update with `git pull`",
        ),
        (whole[: len(whole) // 2], "is cut short, and is no JSON"),
        (whole[:-3], "is cut short, and is no JSON"),
        ("", "is cut short, and is no JSON"),
        (whole.replace(":", ";", 3), "is damaged at line 2, and is no JSON"),
        (written(seed="drop", settings="drop"), "lacks seed, settings"),
        (written(seed="7"), "holds something unexpected under seed"),
        (written(settings={"threads": 1}), "unexpected under settings.dtype, settings.deterministic"),
        ("[]", "is not a manifest"),
        ('{"schema": "new"}', "is not a manifest"),
    ]:
        saved.write_text(text)
        with pytest.raises(ManifestError, match=says) as e:
            reproduce.rerun(saved)
        assert "manifest.json" in one_sentence(e)
    saved.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="is not text"):
        reproduce.load(saved)
    with pytest.raises(ManifestError, match="can't be read: No such file"):
        reproduce.load(tmp_path / "nowhere.json")


def test_a_manifest_of_a_notebook_run_can_be_read_and_not_rerun():
    m = reproduce.describe(CONFIG, seed=1)
    assert json.loads(json.dumps(m)) == m
    with pytest.raises(ManifestError, match="names no function"):
        reproduce.rerun(m)


def test_a_fresh_run_that_fails_or_lasts_is_one_sentence(training, tmp_path):
    run = reproduce.run(training.train, CONFIG, folder=tmp_path / "run")
    slow = run.manifest | {"function": f"{training.__name__}:sleeps", "config": {"seconds": 60}}
    with pytest.raises(ManifestError, match=r"did not end within 0.5 s and was stopped"):
        reproduce.rerun(slow, fresh=True, timeout=0.5)
    broken = run.manifest | {"function": f"{training.__name__}:broken"}
    with pytest.raises(ManifestError, match="failed in a fresh process: RuntimeError: out of paper"):
        reproduce.rerun(broken, fresh=True, timeout=120)


# --- comparing ----------------------------------------------------------------------


def test_a_digest_tells_bits_types_and_shapes_apart():
    def one(x):
        return reproduce_compare.digest(x)["result"]

    x = torch.arange(6.0)
    assert one(x) == one(x.clone()) == one(torch.arange(12.0)[::2] / 2)
    values = [
        x,
        x.view(2, 3),
        x.double(),
        x.bfloat16(),
        -x,
        x[:0],
        torch.tensor(1),
        torch.tensor(True),
        1,
        1.0,
        True,
        "1",
        None,
    ]
    assert len({one(v) for v in values}) == len(values)
    assert one(torch.tensor(0.0)) != one(torch.tensor(-0.0)) and one(0.0) != one(-0.0)
    assert one(torch.tensor(math.nan)) == one(torch.tensor(math.nan))
    assert set(reproduce_compare.digest({"a": [1, (x, {"b.c": 2})]})) == {"a/0", "a/1/0", "a/1/1/b.c"}
    with pytest.raises(reproduce_compare.ResultError, match="one name as text"):
        reproduce_compare.digest({1: 0, "1": 0})
    with pytest.raises(reproduce_compare.ResultError, match="layout"):
        one(torch.eye(2).to_sparse())


def test_values_that_part_are_shown_where_they_part(tmp_path):
    old = {"x": torch.tensor([[1.0, 2, 3], [4, 5, 6]]), "z": torch.tensor(0.0), "n": 3, "s": torch.zeros(2)}
    new = {
        "x": torch.tensor([[1.0, 2, 3], [4, 5.5, 6.25]]),
        "z": torch.tensor(-0.0),
        "n": 4,
        "s": torch.zeros(3),
    }
    kept = tmp_path / "result.pt"
    torch.save(old, kept)
    words = reproduce_compare.compare(reproduce_compare.digest(old), reproduce_compare.digest(new), new, kept)
    assert words == [
        "x: 2 of 6 values differ, first at [1, 1] (5 then, 5.5 now), by 0.5 at most",
        "z: equal values with other bits (the sign of a zero, or the kind of a NaN)",
        "n: 3 then, 4 now",
        "s: torch.float32 [2] then, torch.float32 [3] now",
    ]
    assert reproduce_compare.compare({"a": "0"}, {"b": "0"}, {}) == ["a: not there now", "b: not there then"]


# --- the code a run used ------------------------------------------------------------


def git(folder, *arguments):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    (folder / "gone.py").write_text("x = 1\n")
    (folder / ".gitignore").write_text("site/\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def state(file):
    run, why = reproduce_code.repository(file)
    return reproduce_code.essentials({}, 0, run), why


def test_a_clean_repository_gives_its_commit(repository):
    found, why = state(repository / "train.py")
    assert why == "found" and found["commit"] == git(repository, "rev-parse", "HEAD")
    assert found["clean"] is True and found["diff"] == ""


def test_uncommitted_changes_bring_the_run_back_from_its_commit(repository, tmp_path):
    (repository / "train.py").write_text("lr = 2\n")
    git(repository, "add", "train.py")
    (repository / "train.py").write_text("lr = 3\n# ä\n")
    (repository / "gone.py").unlink()
    (repository / "sub").mkdir()
    (repository / "sub" / "new file.py").write_text("new = 1\n")
    (repository / "weights.bin").write_bytes(bytes(range(256)))
    found, _ = state(repository / "train.py")
    assert found["clean"] is False
    kept = reproduce_code.uncommitted(repository / "train.py")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    (tmp_path / "patch").write_bytes(json.loads(json.dumps(kept["diff"])).encode("utf-8", "surrogateescape"))
    git(clone, "apply", str(tmp_path / "patch"))
    names = ["train.py", "sub/new file.py", "weights.bin"]
    assert all((clone / n).read_bytes() == (repository / n).read_bytes() for n in names)
    assert not (clone / "gone.py").exists()
    assert git(repository, "diff", "--cached", "--name-only") == "train.py"  # the index is as it was


def test_changes_too_long_to_keep_leave_their_digest(repository):
    (repository / "big.txt").write_text("\n".join(map(str, range(60_000))))
    one = reproduce_code.uncommitted(repository / "train.py")
    assert one["diff"] is None and one["diff_bytes"] > reproduce_code.DIFF_LIMIT
    (repository / "huge.bin").write_bytes(b"\0" * 3_000_000)
    two = reproduce_code.uncommitted(repository / "train.py")
    assert two["diff_sha256"] != one["diff_sha256"] and two["diff_bytes"] < one["diff_bytes"] + 1000


def test_code_without_a_commit_says_why(repository, tmp_path, monkeypatch):
    installed = repository / "site" / "package.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert state(installed)[1] == "no repository"
    assert state(None)[1] == "no repository"
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.py").write_text("")
    git(empty, "init", "-q")
    found, why = state(empty / "a.py")
    assert why == "no commit yet" and found["commit"] is found["clean"] is found["diff"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state(repository / "train.py")[1] == "git is not installed"


def test_a_change_of_the_code_is_a_named_difference(repository, tmp_path, monkeypatch):
    name = f"committed_{random.getrandbits(40)}"
    (repository / f"{name}.py").write_text("def train(config):\n    return 1\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "second")
    monkeypatch.syspath_prepend(str(repository))
    module = __import__(name)
    run = reproduce.run(module.train, {}, folder=tmp_path / "run")
    assert run.manifest["clean"] is True
    (repository / f"{name}.py").write_text("def train(config):\n    return 1  # the same\n")
    again = reproduce.rerun(run.folder)
    assert again.same
    assert {d.name for d in again.differences} == {"clean", "diff_sha256", f"sources.{name}"}
    git(repository, "commit", "-qam", "third")
    assert {d.name for d in reproduce.rerun(run.folder).differences} == {"commit", f"sources.{name}"}


# --- sums ---------------------------------------------------------------------------


def test_left_to_right_rounds_after_each_addition():
    x = torch.tensor([2.0**24, 1, 1, 1])
    assert reproduce_sums.left_to_right(x) == 2.0**24
    assert reproduce_sums.left_to_right(x.flip(0)) == 2.0**24 + 4 and reproduce_sums.exact(x) == 2.0**24 + 3
    sums = reproduce_sums.in_orders(torch.rand(3000), 40)
    assert sums.shape == (40,) and len(sums.unique()) > 3


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_every_method_sums_whole_numbers_exactly(n):
    x = torch.randint(-50, 50, (n, 3)).float()
    for method in (*reproduce_sums.METHODS.values(), reproduce_sums.neumaier):
        assert torch.equal(method(x), x.sum(0))


def test_only_neumaier_survives_an_addend_larger_than_the_sum():
    x = torch.tensor([1, 1e10, 1, -1e10])[:, None]
    assert reproduce_sums.neumaier(x).item() == 2 and reproduce_sums.kahan(x).item() == 0


def test_the_explorer_orders_the_methods():
    data = reproduce_sums.errors(longest=10, numbers="one large first")
    last = {name: e[-1].median() for name, e in data["errors"].items()}
    assert data["n"][-1] == 1024 and last["one after the other"] > 4 * last["compensated"]
    assert last["compensated"] <= 2 * data["roundoff"]
    for dtype in reproduce_sums.ROUNDOFF:
        assert torch.isfinite(reproduce_sums.errors(longest=4, dtype=dtype)["errors"]["compensated"]).all()
    with pytest.raises(ValueError, match="expected one of"):
        reproduce_sums.errors(numbers="no such")


# --- determinism --------------------------------------------------------------------


def test_answers_are_counted_to_the_last_bit():
    values = iter([0.0, -0.0, 0.0, math.nan, math.nan, 1.0])
    assert reproduce_determinism.answers(lambda: torch.tensor(next(values)), times=6) == 4
    same = torch.zeros(3)
    assert reproduce_determinism.answers(lambda: [same.zero_(), torch.ones(2)]) == 1


def test_every_operator_has_a_price_on_a_cpu_too():
    before = torch.are_deterministic_algorithms_enabled()
    if machine.has_gpu():
        pytest.skip("needs CUBLAS_WORKSPACE_CONFIG before CUDA starts")
    found = reproduce_determinism.prices(seconds=0.002, small=True)
    assert torch.are_deterministic_algorithms_enabled() == before
    assert len(found) == 17 and all(p.seconds > 0 and p.answers >= 1 and p.ratio > 0 for p in found)
    shown = reproduce_figures.prices_table([*found, reproduce_determinism.Price("ctc", 3, 1e-3, None)])
    assert shown.splitlines()[-1].split() == ["ctc", "3", "1,000", "µs", "raises", "none"]


def test_prices_come_back_from_what_was_recorded(monkeypatch):
    found = [
        reproduce_determinism.Price("index_add", 9, 1e-4, 4e-4),
        reproduce_determinism.Price("bincount_weights", 3, 1e-4, None),
    ]
    noted = {}
    monkeypatch.setattr(recorded, "note", lambda name, value, unit: noted.update({name: value}))
    reproduce_figures.note_prices(found)
    rows = [{"name": n, "value": v} for n, v in noted.items()]
    monkeypatch.setattr(recorded, "figures", lambda lesson: rows)
    monkeypatch.setattr(recorded, "get", lambda name: next((r for r in rows if r["name"] == name), None))
    assert [(p.name, p.answers, p.ratio) for p in reproduce_figures.recorded_prices()] == [
        ("index_add", 9, 4.0), ("bincount_weights", 3, None)
    ]  # fmt: skip


def test_every_figure_is_drawn_from_plain_data():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    one = torch.linspace(2, 0, 30)
    run = reproduce_hogwild.Trained("alone", 0, 0.1, one, 0.5, 0.9)
    price = reproduce_determinism.Price("sum", 1, 1e-4, 1e-4)
    figs = [
        reproduce_figures.draw_orders(torch.tensor([1.0, 2, 2, 3]), 2.0),
        reproduce_figures.draw_errors(reproduce_sums.errors(longest=3)),
        reproduce_figures.draw_losses(one, one + (torch.arange(30) > 9) * 1e-6, ["a", "b"]),
        reproduce_figures.draw_losses(one, one, ["a", "b"]),
        reproduce_figures.draw_prices([price, price._replace(name="ctc", deterministic=None)], "here"),
        reproduce_figures.draw_spread([run, run._replace(mode="locked")]),
        reproduce_figures.draw_convergence({"alone": [(1, 0.5), (2, 0.3)]}),
    ]
    for fig in figs:
        fig.canvas.draw()
    assert len(plt.get_fignums()) == len(figs)
    plt.close("all")
    assert reproduce_figures.said(None, 3) == "it is 3; no prediction was written down"
    assert reproduce_figures.said(4, 3.5, "%") == "you said 4 %, it is 3.5 %"


@pytest.mark.gpu
@pytest.mark.skipif(not machine.has_gpu(), reason="needs a CUDA device")
def test_atomics_give_several_answers_and_determinism_gives_one():
    code = textwrap.dedent("""
        import os
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        from course_lib.reproduce import determinism as d
        found = {p.name: p for p in d.prices(seconds=0.01)}
        assert found["index_add"].answers > 1, found["index_add"]
        assert found["sum"].answers == 1
        assert found["index_add"].ratio is not None and found["bincount_weights"].ratio is None
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_outside_a_loader_a_worker_is_seeded_from_torchs_seed():
    with reproduce.seeded(3):
        reproduce_seeding.seed_worker(0)
        first = random.random(), np.random.rand()
        reproduce_seeding.seed_worker(0)
        assert (random.random(), np.random.rand()) == first
