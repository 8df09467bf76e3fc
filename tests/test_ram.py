"The limits of memory of this process."

import pytest

from course_lib import ram


@pytest.mark.parametrize(
    ("proc", "group", "files"),
    [
        ("0::/a/b\n", "a", ("memory.max", "memory.current", "inactive_file")),
        ("3:cpu:/\n9:memory,hugetlb:/a/b\n0::/\n", "memory/a",
         ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)  # fmt: skip
def test_the_memory_limit_of_a_nested_group(tmp_path, proc, group, files):
    limit, used, cache = files
    (tmp_path / "cgroup").write_text(proc)
    for folder, most in ((tmp_path / group / "b", "max\n"), (tmp_path / group, f"{2**31}\n")):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((limit, most), (used, "1000\n"), ("memory.stat", f"anon 7\n{cache} 300\n")):
            (folder / name).write_text(text)
    assert ram.limits(tmp_path / "cgroup", tmp_path) == [(2**31, 700)]
    assert ram.limits(tmp_path / "nothing", tmp_path) == []
    assert 0 < ram.available() <= ram.total()
