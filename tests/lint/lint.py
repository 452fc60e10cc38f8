#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""House style as a test. Each check prints `file:line: finding` and exits 1 if there is any.

  lint.py sources             SPDX line, line length, trailing space, ASCII, banned calls, file size
  lint.py format              C++ as clang-format-19 leaves it
  lint.py shell               shellcheck of every shell script
  lint.py docs                links between files, and the files that documented commands name
  lint.py commands KVTIERCTL  documented `kvtierctl` subcommands exist in that program
"""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED_DIRS = {".git", "build", ".cache", "__pycache__"}
# Kept as their authors wrote them; the origin is noted beside them.
VENDORED = ("proto/google/", "LICENSE")

CPP = {".h", ".cc", ".c", ".cu", ".cuh"}
SOURCE = CPP | {".proto", ".py", ".sh", ".cmake", ".toml", ".apt", ".service", ".supp", ".yaml"}
SOURCE_NAMES = {"CMakeLists.txt", ".clang-format", ".clang-tidy", ".gitignore", "requirements.txt"}
TEXT = SOURCE | {".md", ".json", ".txt"}

MAX_COLUMNS = 100
MAX_CPP_LINES = 600

TESTS = re.compile(r"_test\.(cc|cu)$")
PROGRAMS = re.compile(
    r"(_(test|test_util|bench|main|child)\.(cc|cu)$|(^|/)main\.cc$|^tests/|^client/ctl/)")
TEST_CODE = re.compile(r"_(test|fixture|fuzz|child)\.(cc|h)$|/(fake|test)_[^/]*$|^tests/")
TIMED_WAIT = re.compile(r"^proto/base/timed_wait\.h$")
SANITIZERS = re.compile(r"^deploy/sanitizers/")

# (pattern, what to use instead, only in these paths or None, not in these paths or None)
BANNED = [
    (r"\bstd::thread\b(?!::)", "std::jthread", None, None),
    (r"\bstd::(recursive_|shared_|timed_)*mutex\b", "absl::Mutex", None, None),
    (r"\bstd::(lock_guard|unique_lock|scoped_lock|shared_lock)\b", "absl::MutexLock", None, None),
    (r"\bstd::condition_variable", "Mutex::Await or TimedCondition", None, TIMED_WAIT),
    (r"\b\w*(WithTimeout|WithDeadline)\s*\(", "TimedCondition or TimedNotification", None,
     TEST_CODE),
    (r"\b(sleep_for|sleep_until|usleep|nanosleep|SleepFor)\b", "wait for the event", TESTS, None),
    (r"(?<![\w.>])(printf|puts|putchar)\s*\(|\bstd::cout\b", "the log or a return value", None,
     PROGRAMS),
    (r"\bthrow\b", "absl::Status", None, None),
    (r"\busing namespace\b", "a qualified name", None, None),
    (r"\b(strcpy|strcat|sprintf|gets|rand|srand)\s*\(", "a bounded or seeded call", None, None),
]
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")

COMMENT_OR_LITERAL = re.compile(
    r'R"(\w*)\((?:.|\n)*?\)\1"|//[^\n]*|/\*(?:.|\n)*?\*/'
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'')


def files():
    """Repository-relative paths of all files, without build output."""
    for folder, dirs, names in os.walk(ROOT):
        dirs[:] = sorted(d for d in dirs if d not in SKIPPED_DIRS)
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            if path.is_file():
                yield path.relative_to(ROOT).as_posix()


def is_shell(path):
    if path.endswith(".sh"):
        return True
    with open(ROOT / path, "rb") as file:
        return re.match(rb"#!.*\b(ba)?sh\b", file.readline(80)) is not None


def is_source(path):
    name = path.rsplit("/", 1)[-1]
    if pathlib.PurePath(path).suffix in SOURCE or name in SOURCE_NAMES:
        return True
    return "." not in name and is_shell(path)


def code_only(text):
    """C++ text with comments and literals blanked out, line breaks kept."""
    return COMMENT_OR_LITERAL.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def check_text(path, text):
    """Findings of the `sources` check in one file, as (line, message)."""
    source, cpp = is_source_name(path, text), pathlib.PurePath(path).suffix in CPP
    lines = text.split("\n")
    if source and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
        yield 1, "no SPDX-License-Identifier: Apache-2.0 in the first lines"
    if text and not text.endswith("\n"):
        yield len(lines), "no newline at the end"
    for number, line in enumerate(lines, 1):
        if not line.isascii():
            yield number, "not ASCII"
        if line != line.rstrip():
            yield number, "trailing space"
        if source and len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, more than {MAX_COLUMNS}"
        if source and UNFINISHED.search(line):
            yield number, "unfinished work: finish it or file it"
    if not cpp:
        return
    if len(lines) - 1 > MAX_CPP_LINES:
        yield 1, f"{len(lines) - 1} lines, more than {MAX_CPP_LINES}: split by concept"
    if SANITIZERS.search(path):
        return
    for number, line in enumerate(code_only(text).split("\n"), 1):
        for pattern, instead, applies, allowed in BANNED:
            if (applies and not applies.search(path)) or (allowed and allowed.search(path)):
                continue
            if found := re.search(pattern, line):
                yield number, f"{found.group().strip()}: use {instead}"


def is_source_name(path, text):
    name = path.rsplit("/", 1)[-1]
    suffix = pathlib.PurePath(path).suffix
    return suffix in SOURCE or name in SOURCE_NAMES or ("." not in name and text.startswith("#!"))


def check_sources():
    for path in files():
        name = path.rsplit("/", 1)[-1]
        if path.startswith(VENDORED):
            continue
        text_file = pathlib.PurePath(path).suffix in TEXT or name in SOURCE_NAMES
        if text_file or is_source(path):
            text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
            for number, message in check_text(path, text):
                yield f"{path}:{number}: {message}"


def run_tool(command):
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return [f"{command[0]} not found: run deploy/setup"]
    if done.returncode == 0:
        return []
    return (done.stdout + done.stderr).splitlines() or [f"{command[0]} exited {done.returncode}"]


def check_format():
    paths = [p for p in files()
             if pathlib.PurePath(p).suffix in CPP and not p.startswith(VENDORED)]
    return run_tool(["clang-format-19", "--dry-run", "-Werror", *paths]) if paths else []


def check_shell():
    return run_tool(["shellcheck", *(p for p in files() if "." not in p.rsplit("/", 1)[-1]
                                     and is_shell(p) or p.endswith(".sh"))])


def anchor(heading):
    """The fragment a heading gets on code hosts."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def without_fences(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def broken_links(path, text, exists, read):
    """Relative links of one Markdown text whose file or heading does not exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        linked = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if linked.startswith("..") or not exists(linked):
            yield f"{path}: link to {target}: no such file"
        elif fragment and linked.endswith(".md"):
            headings = re.findall(r"^#+ (.*)$", without_fences(read(linked)), re.M)
            if fragment not in map(anchor, headings):
                yield f"{path}: link to {target}: no such heading"


def shell_commands(text):
    """The commands in a Markdown text's sh blocks, as word lists; prompts and comments removed."""
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"(^| )#.*", "", line).removeprefix("$ ").split()
            if words:
                yield words


def missing_program(word):
    """Why the program a documented command names cannot exist, or None."""
    built = re.fullmatch(r"build/[\w-]+/(.+)/([\w.-]+)", word)
    if built:
        listfile = ROOT / built.group(1) / "CMakeLists.txt"
        if not listfile.is_file() or not re.search(
                rf"\bkvtier_add_executable\(\s*{re.escape(built.group(2))}\b",
                listfile.read_text(encoding="utf-8")):
            return f"{word} is not built by {built.group(1)}/CMakeLists.txt"
    elif "/" in word and not word.startswith(("/", "~", "$")):
        if not os.access(ROOT / word, os.X_OK):
            return f"{word} does not exist or is not executable"
    return None


def check_docs():
    markdown = [p for p in files() if p.endswith(".md")]

    def read(path):
        return (ROOT / path).read_text(encoding="utf-8")

    for path in markdown:
        yield from broken_links(path, read(path), lambda p: (ROOT / p).exists(), read)
        for words in shell_commands(read(path)):
            if problem := missing_program(words[0]):
                yield f"{path}: command `{' '.join(words)}`: {problem}"


def check_commands(kvtierctl):
    for path in (p for p in files() if p.endswith(".md")):
        for words in shell_commands((ROOT / path).read_text(encoding="utf-8")):
            if words[0].rsplit("/", 1)[-1] != "kvtierctl":
                continue
            subcommand = next((w for w in words[1:] if not w.startswith("-")), None)
            if subcommand and run_tool([kvtierctl, subcommand, "--help"]):
                yield f"{path}: kvtierctl has no command {subcommand}"


def main(arguments):
    checks = {"sources": check_sources, "format": check_format, "shell": check_shell,
              "docs": check_docs, "commands": check_commands}
    if not arguments or arguments[0] not in checks:
        sys.exit(__doc__)
    findings = list(checks[arguments[0]](*arguments[1:]))
    print("\n".join(findings) if findings else f"{arguments[0]}: nothing found")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
