"""The hazard check can fail: three lines of machine code with one in them, and the same without."""

from __future__ import annotations

from hopper_sass import copy_loops, hazards, loops, parse, step_loops

CLEAN = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0100*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0110*/                   FADD R2, R3, R3 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0130*/                   FADD R24, R24, R3 ;
        /*0140*/               @P0 BRA 0x100 ;
        /*0150*/                   EXIT ;
"""


def test_a_clean_loop() -> None:
    code = parse(CLEAN)
    assert [len(loop.body) for loop in loops(code)] == [5]
    [step] = step_loops(code, 1)
    assert step.count("HGMMA") == 1
    assert not copy_loops(code)
    assert hazards(code) == []


def test_an_operand_that_is_overwritten() -> None:
    [found] = hazards(parse(CLEAN.replace("FADD R2, R3, R3", "FADD R5, R3, R3")))
    assert "writes R5" in found


def test_a_sum_that_is_read_too_early() -> None:
    [found] = hazards(parse(CLEAN.replace("FADD R2, R3, R3", "FADD R2, R30, R3")))
    assert "reads R30" in found


def test_a_wait_that_is_missing() -> None:
    assert hazards(parse(CLEAN.replace("gsb0, 0x0 ;", "gsb0, 0x1 ;")))
