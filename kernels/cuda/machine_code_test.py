#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the machine code of the CUDA kernels: machine_code_test.py OBJECT...

Takes the code of every architecture out of objects that nvcc wrote with --compress-mode=none and
disassembles it. For every kernel: no local memory (spills and stack frames would show as LDL and
STL). For the kernels of BUDGETS: instructions that must be there, and instructions per value along
the path that nearly every thread takes. Skipped, exit status 77, without objects or nvdisasm
(nvidia-cuda-nvdisasm of deploy/requirements.txt, KVTIER_NVDISASM, or the toolkit's).
"""

import collections
import heapq
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
COMPARING = ["sm_80", "sm_86", "sm_89", "sm_90a"]
CONVERTING = ["sm_100a", "sm_103a", "sm_120a"]

# What a kernel must satisfy on some architectures.
#   kernel      regular expression for the mangled name
#   needs       opcodes (prefixes of the mnemonic with its suffixes) that must occur
#   path        "through OPCODE": the shortest way from the entry over an OPCODE to the exit;
#               "loop OPCODE": once round the loop that holds most OPCODEs. Rare paths (NaNs,
#               options, counters) only lengthen a way, so the shortest is the usual one.
#               "blocks OPCODE n": once round the loop that has blocks of straight code with more
#               than n OPCODEs, through all of these blocks
#               "tight OPCODE n": the shortest way round any loop that passes n OPCODEs
#   unit        (OPCODE, n): each one on the path stands for n values
#   most        instructions per value at most
Budget = collections.namedtuple("Budget", "kernel architectures needs path unit most")
BF16, FP16, FP32, FP8 = (f"ElementTypeE{i}E" for i in range(4))
BUDGETS = [
    # A thread stores 8 code bytes for a vector of 16 values.
    Budget(f"SealKernel.*{BF16}", COMPARING, ["LDG.E.128", "STG.E.64", "HSET2"],
           "loop STG.E.64", ("STG.E.64", 16), 14.0),
    Budget(f"SealKernel.*{BF16}", CONVERTING, ["LDG.E.128", "STG.E.64", "F2FP.SATFINITE.E2M1"],
           "loop STG.E.64", ("STG.E.64", 16), 11.0),
    # Decode, 8 query rows of head dim 128: an HMMA stands for 16 x 16 values of 32 lanes. Over a
    # stage, with its softmax and the start of the next copies.
    Budget("DecodeKernelILj128ELj1ELj1E", ["sm_90a"], ["LDS.128"], "blocks HMMA 8", ("HMMA", 8),
           22.0 / 8),
    Budget("DecodeKernelILj128ELj1ELj1E", ["sm_80", "sm_86", "sm_89"], ["LDS.128"],
           "blocks HMMA 8", ("HMMA", 8), 23.0 / 8),
    Budget("DecodeKernelILj128ELj1ELj1E", CONVERTING, ["LDS.128", "F2FP.F16.E2M1"],
           "blocks HMMA 8", ("HMMA", 8), 16.0 / 8),
    # The same for queries of two parts: K meets both, so 3 HMMA stand for 2 * 16 * 16 values.
    Budget("DecodeKernelILj128ELj1ELj2E", COMPARING, ["LDS.128"], "blocks HMMA 8",
           ("HMMA", 16 / 3), 24.0 / 8),
    Budget("DecodeKernelILj128ELj1ELj2E", CONVERTING, ["LDS.128", "F2FP.F16.E2M1"],
           "blocks HMMA 8", ("HMMA", 16 / 3), 18.0 / 8),
    # A store of 16 bytes is 8 values of BF16.
    Budget(f"GatherKernel.*{BF16}", COMPARING, ["STG.E.128"], "loop STG.E.128", ("STG.E.128", 8),
           11.0),
    Budget(f"GatherKernel.*{BF16}", CONVERTING, ["STG.E.128", "F2FP.F16.E2M1"], "loop STG.E.128",
           ("STG.E.128", 8), 11.0),
    # Layers with wide sides: the shortest way through them is that of a BF16 side.
    Budget(f"SealMixedKernel.*{BF16}", COMPARING, ["LDG.E.128", "STG.E.64", "STG.E.128", "HSET2"],
           "loop STG.E.128", ("STG.E.128", 8), 6.0),
    Budget(f"SealMixedKernel.*{BF16}", CONVERTING,
           ["LDG.E.128", "STG.E.64", "STG.E.128", "F2FP.SATFINITE.E2M1"], "loop STG.E.128",
           ("STG.E.128", 8), 6.0),
    Budget(f"GatherMixedKernel.*{BF16}", COMPARING, ["LDG.E.128", "STG.E.128"], "loop STG.E.128",
           ("STG.E.128", 8), 8.0),
    Budget(f"GatherMixedKernel.*{BF16}", CONVERTING, ["LDG.E.128", "STG.E.128", "F2FP.F16.E2M1"],
           "loop STG.E.128", ("STG.E.128", 8), 8.0),
    # Latents, as K and V above.
    Budget(f"SealLatents.*{BF16}", COMPARING, ["LDG.E.128", "STG.E.64", "STG.E.128", "HSET2"],
           "loop STG.E.64", ("STG.E.64", 16), 14.5),
    Budget(f"SealLatents.*{BF16}", CONVERTING,
           ["LDG.E.128", "STG.E.64", "STG.E.128", "F2FP.SATFINITE.E2M1"], "loop STG.E.64",
           ("STG.E.64", 16), 12.0),
    Budget(f"GatherLatents.*{BF16}", COMPARING, ["LDG.E.128", "STG.E.128"], "loop STG.E.128",
           ("STG.E.128", 8), 12.0),
    Budget(f"GatherLatents.*{BF16}", CONVERTING, ["LDG.E.128", "STG.E.128", "F2FP.F16.E2M1"],
           "loop STG.E.128", ("STG.E.128", 8), 12.0),
    # The scores: 8 dims of a token times 8 query rows, with their share of dequantizing. For each
    # multiply-add of a lane.
    Budget("MlaDecodeKernel", COMPARING, ["LDG.E.128", "LDS.128"], "tight FFMA 64", ("FFMA", 1),
           1.9),
    Budget("MlaDecodeKernel", CONVERTING, ["LDG.E.128", "LDS.128", "F2FP.F16.E2M1"],
           "tight FFMA 64", ("FFMA", 1), 1.9),
]

Instruction = collections.namedtuple("Instruction", "opcode predicated target")
EM_CUDA = 190
SKIPPED = 77


def cubins(data):
    """The CUDA ELF images in the bytes of an object."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == EM_CUDA:
            program_offset, section_offset = struct.unpack_from("<QQ", data, at + 32)
            sizes = struct.unpack_from("<HHHH", data, at + 54)
            end = max(program_offset + sizes[0] * sizes[1], section_offset + sizes[2] * sizes[3])
            yield data[at:at + end]
        at = data.find(b"\x7fELF", at + 4)


def disassemble(nvdisasm, image):
    """(architecture, {kernel: instructions}) of an ELF image; targets are instruction indices."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        text = subprocess.run([nvdisasm, file.name], check=True, capture_output=True,
                              text=True).stdout
    architecture = re.search(r"\.target\s+(sm_\w+)", text).group(1)
    kernels, name = {}, None
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+),", line):
            name = section.group(1)
            kernels[name] = ([], {})
        elif re.match(r"\s*\.section\s", line):
            name = None
        elif name and (label := re.match(r"(\.L_x_\w+):", line)):
            kernels[name][1][label.group(1)] = len(kernels[name][0])
        elif name and (code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line)):
            words = code.group(1).split(None, 1)
            predicated = words[0].startswith("@")
            if predicated:
                words = words[1].split(None, 1)
            target = re.search(r"`\((\.L_x_\w+)\)", code.group(1))
            conditional = predicated and not words[0] == "@!PT"
            kernels[name][0].append(
                Instruction(words[0], conditional, target.group(1) if target else None))
    for name, (code, labels) in kernels.items():
        kernels[name] = [i._replace(target=labels.get(i.target)) for i in code]
    return architecture, kernels


def successors(code, at):
    """Instructions that can follow instruction `at`."""
    opcode = code[at].opcode.split(".")[0]
    if opcode == "BRA":
        # A branch on a uniform predicate (BRA.U UP0, label) is conditional without an @.
        conditional = code[at].predicated or ".U" in code[at].opcode or ".DIV" in code[at].opcode
        if code[at].target is not None:
            yield code[at].target
        if not conditional:
            return
    elif opcode in ("EXIT", "RET") and not code[at].predicated:
        return
    if at + 1 < len(code):
        yield at + 1


def shortest(code, start, is_goal, allowed=None):
    """Instructions on the shortest way from `start` to a goal, both included, or None. With
    `allowed`, only through instructions of this range."""
    queue, before = [(1, start)], {start: None}
    while queue:
        length, at = heapq.heappop(queue)
        if is_goal(at):
            way = []
            while at is not None:
                way.append(at)
                at = before[at]
            return way[::-1]
        for after in successors(code, at):
            if after not in before and (allowed is None or after in allowed):
                before[after] = at
                heapq.heappush(queue, (length + 1, after))
    return None


def straight_blocks(code):
    """(first, last) of every run of instructions without a branch or a branch's target inside."""
    starts = {0} | {i.target for i in code if i.target is not None}
    starts |= {at + 1 for at, i in enumerate(code) if i.opcode.split(".")[0] in ("BRA", "EXIT")}
    starts = sorted(at for at in starts if at < len(code))
    return list(zip(starts, [at - 1 for at in starts[1:]] + [len(code) - 1]))


def path_through_blocks(code, opcode, least):
    """Once round a loop through its blocks that have more than `least` opcodes, or None."""
    blocks = [(first, last) for first, last in straight_blocks(code)
              if sum(i.opcode.startswith(opcode) for i in code[first:last + 1]) > least]
    if not blocks:
        return None
    loops = [(at - i.target, i.target, at) for at, i in enumerate(code)
             if i.target is not None and i.target <= blocks[0][0] and at >= blocks[-1][1]]
    if not loops:
        return None
    _, head, end = min(loops)
    way, at = [], head
    for first, last in blocks:
        piece = shortest(code, at, lambda i, first=first: i == first, range(head, end + 1))
        if piece is None:
            return None
        way += piece[:-1] if not way else piece[1:-1]
        way += range(first, last + 1)
        at = last
    piece = shortest(code, at, lambda i: i == end, range(head, end + 1))
    return None if piece is None else [code[i] for i in way + piece[1:]]


def usual_path(code, path):
    """The instructions of a budget's path, or None."""
    kind, opcode, *least = path.split()
    if kind == "blocks":
        return path_through_blocks(code, opcode, int(least[0]))
    if kind == "through":
        front = shortest(code, 0, lambda at: code[at].opcode.startswith(opcode))
        if front is None:
            return None
        back = shortest(code, front[-1],
                        lambda at: code[at].opcode == "EXIT")
        return [code[at] for at in front + back[1:]]
    best, best_count = None, 0
    for end, instruction in enumerate(code):
        if instruction.target is None or instruction.target > end or \
                not instruction.opcode.startswith("BRA"):
            continue
        way = shortest(code, instruction.target, lambda at, end=end: at == end)
        if way is None:
            continue
        count = sum(code[at].opcode.startswith(opcode) for at in way)
        if kind == "tight":
            is_better = count >= int(least[0]) and (best is None or len(way) < len(best))
        else:
            is_better = count > best_count
        if is_better:
            best, best_count = [code[at] for at in way], count
    return best


def check_budget(budget, architecture, name, code):
    """Findings about one kernel, and its instructions per value."""
    for needed in budget.needs:
        if not any(i.opcode.startswith(needed) for i in code):
            yield f"{architecture} {name}: no {needed}", None
    path = usual_path(code, budget.path)
    units = sum(i.opcode.startswith(budget.unit[0]) for i in path or [])
    if units == 0:
        yield f"{architecture} {name}: no path {budget.path} with {budget.unit[0]}", None
        return
    per_value = len(path) / (units * budget.unit[1])
    finding = None
    if per_value > budget.most:
        finding = f"{architecture} {name}: {per_value:.2f} instructions per value, " \
                  f"more than {budget.most}"
    yield finding, per_value


def check_objects(nvdisasm, objects):
    """(findings, table lines) over all objects."""
    findings, lines = [], []
    seen = collections.Counter()
    for path in objects:
        for image in cubins(pathlib.Path(path).read_bytes()):
            architecture, kernels = disassemble(nvdisasm, image)
            for name, code in kernels.items():
                seen[name] += 1
                local = [i.opcode for i in code if i.opcode.startswith(("LDL", "STL"))]
                if local:
                    findings.append(f"{architecture} {name}: {len(local)} accesses to local memory")
                for row, budget in enumerate(BUDGETS):
                    if architecture not in budget.architectures or \
                            not re.search(budget.kernel, name):
                        continue
                    seen[row, architecture] += 1
                    for finding, per_value in check_budget(budget, architecture, name, code):
                        findings += [finding] if finding else []
                        if per_value is not None:
                            lines.append(f"{architecture:8} {per_value:6.2f} of {budget.most:5.1f} "
                                         f"instructions per value  {budget.kernel}")
    for name, count in seen.items():
        if isinstance(name, str) and count != len(ARCHITECTURES):
            findings.append(f"{name}: code for {count} architectures of {len(ARCHITECTURES)}")
    for row, budget in enumerate(BUDGETS):
        for architecture in budget.architectures:
            if seen[row, architecture] == 0:
                findings.append(f"{architecture}: no kernel {budget.kernel}")
    return findings, lines


def find_nvdisasm():
    root = pathlib.Path(__file__).resolve().parents[2]
    venv = sorted(root.glob("build/venv/lib/python3*/site-packages/nvidia/cu*/bin/nvdisasm"))
    if venv:
        return str(venv[0])
    return os.environ.get("KVTIER_NVDISASM") or shutil.which("nvdisasm")


def main():
    objects = sys.argv[1:]
    nvdisasm = find_nvdisasm()
    if not objects or nvdisasm is None:
        missing = "nvdisasm: deploy/setup --python" if objects else "objects of nvcc"
        print(f"SKIPPED: no {missing}")
        return SKIPPED
    findings, lines = check_objects(nvdisasm, objects)
    print("\n".join(sorted(lines)))
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
