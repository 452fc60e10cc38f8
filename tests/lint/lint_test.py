#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The lint checks find what they are for, and nothing else."""

import unittest

import lint

SPDX = "// SPDX-License-Identifier: Apache-2.0\n"


def messages(path, text):
    return [message for _, message in lint.check_text(path, text)]


class SourcesTest(unittest.TestCase):

    def test_accepts_a_clean_file(self):
        self.assertEqual(messages("tiers/a.cc", SPDX + "int x = 1;\n"), [])

    def test_finds_each_fault_of_form(self):
        for text, finding in [
            ("int x;\n", "no SPDX"),
            (SPDX + "int x;", "no newline"),
            (SPDX + "int x; \n", "trailing space"),
            (SPDX + "// caf\u00e9\n", "not ASCII"),
            (SPDX + "//" + "x" * 99 + "\n", "101 columns"),
            (SPDX + "// TO" "DO: later\n", "unfinished"),
            (SPDX + "\n" * 601, "602 lines"),
        ]:
            found = messages("tiers/a.cc", text)
            self.assertEqual(len(found), 1, text)
            self.assertIn(finding, found[0])

    def test_finds_banned_calls(self):
        for code in ["std::thread t;", "std::mutex m;", "std::lock_guard l(m);", "printf(\"x\");",
                     "std::cout << 1;", "throw 1;", "using namespace std;",
                     "std::condition_variable c;", "m.AwaitWithTimeout(c, t);",
                     "n.WaitForNotificationWithTimeout(t);"]:
            self.assertEqual(len(messages("tiers/a.cc", SPDX + code + "\n")), 1, code)

    def test_leaves_allowed_uses_alone(self):
        for code in ["std::thread::id id;", "std::jthread t;", "std::snprintf(b, n, f);",
                     "// never throw 1;", "F(\"throw printf(\");", "absl::SleepFor(d);",
                     "/* std::mutex\n std::mutex */", "R\"(throw \" 1)\";"]:
            self.assertEqual(messages("tiers/a.cc", SPDX + code + "\n"), [], code)

    def test_depends_on_the_kind_of_file(self):
        self.assertEqual(len(messages("tiers/a_test.cc", SPDX + "sleep_for(d);\n")), 1)
        self.assertEqual(messages("tiers/fake_a.h", SPDX + "m.AwaitWithTimeout(c, t);\n"), [])
        self.assertEqual(messages("client/ctl/tiers_command.cc", SPDX + "printf(\"x\");\n"), [])
        self.assertEqual(messages("docs/a.md", "x" * 300 + "\n"), [])


class DocsTest(unittest.TestCase):

    def broken(self, text):
        return list(lint.broken_links("docs/a.md", text, lambda p: p in ("README.md", "docs/a.md"),
                                      lambda p: "# One `two`: three\n"))

    def test_resolves_links_from_the_folder_of_the_file(self):
        links = "[r](../README.md) [w](https://x.y/z) [h](#one-two-three)"
        self.assertEqual(self.broken(links), [])

    def test_finds_broken_links(self):
        for text in ["[r](README.md)", "[o](../../x.md)", "[h](#four)", "[h](../README.md#four)"]:
            self.assertEqual(len(self.broken(text)), 1, text)

    def test_ignores_code_blocks(self):
        self.assertEqual(self.broken("```\n[r](none.md)\n```\n"), [])

    def test_reads_commands_of_shell_blocks(self):
        text = "```sh\n$ deploy/x --y  # why\n# comment\na \\\n  b\n```\n```text\nno\n```\n"
        self.assertEqual(list(lint.shell_commands(text)), [["deploy/x", "--y"], ["a", "b"]])

    def test_knows_programs_that_exist(self):
        self.assertIsNone(lint.missing_program("tests/run"))
        self.assertIsNone(lint.missing_program("git"))
        self.assertIsNotNone(lint.missing_program("tests/none"))
        self.assertIsNotNone(lint.missing_program("build/release/tests/none"))


if __name__ == "__main__":
    unittest.main()
