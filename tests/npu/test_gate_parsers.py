"""Readers of the compilers' output, on short texts in their format."""

import json

import pytest

from mindspeed_kda.npu_kernels.ascend_check import hivm
from mindspeed_kda.npu_kernels.ascend_check.compile import Overflow, read_memory_report, read_overflows
from mindspeed_kda.npu_kernels.ascend_check.spec import KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import target_named

STRUCTURED = """\
module attributes {hivm.module_core_type = #hivm.module_core_type<MIX>} {
  func.func @k_infer_workspace_shape_function() -> index attributes {hacc.function_kind = #hacc.function_kind<HOST>} {
    %c131072 = arith.constant 131072 : index
    return %c131072 : index
  }
  func.func private @mma_tile_half_to_float(memref<?xf16>) attributes {llvm.emit_c_interface}
  func.func @k_mix_aic(%arg0: memref<?xf16, #hivm.address_space<gm>>) attributes {hacc.entry} {
    %c0 = arith.constant 0 : index
    %c24576_i64 = arith.constant 24576 : i64
    %0 = hivm.hir.pointer_cast(%c24576_i64) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %a = memref.load %arg0[%c0] : memref<64xf16, #hivm.address_space<gm>>
    scf.for %arg1 = %c0 to %c0 step %c0 {
      %b = memref.load %arg0[%c0] : memref<1xi64, strided<[1], offset: ?>, #hivm.address_space<gm>>
      scf.if %true {
        func.call @mma_tile_half_to_float(%arg0) : (memref<?xf16>) -> ()
      } else {
        memref.store %b, %x[%arg1] : memref<64xi8, #hivm.address_space<ub>>
      } {hivm.unlikely_condition}
    } {pipeline.cubeonly}
    return
  }
}
"""
BLOCKS = """\
module attributes {hivm.module_core_type = #hivm.module_core_type<AIV>} {
  func.func @k(%arg0: memref<?xf32, #hivm.address_space<gm>>) attributes {hacc.entry} {
    %0 = llvm.mlir.constant(32768 : i64) : i64
    %1 = hivm.hir.pointer_cast(%0) : memref<1024xf32, #hivm.address_space<ub>>
    memref.store %0, %alloca[%2] : memref<1xi64>
    cf.br ^bb1(%3 : i32)
  ^bb1(%4: i32):  // 2 preds: ^bb0, ^bb2
    cf.cond_br %5, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %6 = memref.load %alloca[%2] {x = 0 : i32} : memref<1xi64>
    %7 = memref.load %1[%6] {DiscreteMemAccess} : memref<64xi32, #hivm.address_space<ub>>
    cf.br ^bb1(%8 : i32)
  ^bb3:  // pred: ^bb1
    %9 = memref.load %1[%6] : memref<64xi32, #hivm.address_space<ub>>
    return
  }
}
"""


def test_structured_module():
    module = hivm.parse_module(STRUCTURED)
    assert list(module.functions) == ["k_infer_workspace_shape_function", "k_mix_aic"]
    assert hivm.core_type(module) == "mix"
    assert hivm.workspace_bytes(module) == 131072
    assert hivm.matrix_products(module) == 1
    assert hivm.planned_peaks(module) == {"cbuf": 24576 + 4 * 4 * 16 * 16 * 2}


def test_scalar_access_counts_inside_loops_only_and_spares_metadata():
    assert hivm.scalar_accesses(hivm.parse_module(STRUCTURED)) == ["store memref<64xi8, #hivm.address_space<ub>>"]


def test_scalar_access_in_a_loop_of_branches():
    module = hivm.parse_module(BLOCKS)
    assert hivm.scalar_accesses(module) == ["load memref<64xi32, #hivm.address_space<ub>>"]
    assert hivm.planned_peaks(module) == {"ub": 32768 + 1024 * 4}
    assert hivm.core_type(module) == "vector"
    assert hivm.workspace_bytes(module) == 0


def test_loop_depth_of_blocks():
    blocks = hivm.parse_module(BLOCKS).functions["k"].blocks
    assert hivm.block_depths(blocks) == [0, 1, 1, 0]


def test_a_line_it_cannot_read_is_an_error():
    with pytest.raises(ValueError, match="cannot read the line '<<'"):
        hivm.parse_module("  func.func @k() {\n    <<\n  }\n")


def test_memory_report_has_offsets_in_bytes_and_extents_in_bits():
    buffers = [{"offset": [0, 24576], "extent": 65536}, {"offset": [2048], "extent": 16384}]
    records = [{"scope": "cbuf", "memory_info_array": buffers}, {"scope": "cc", "memory_info_array": []}]
    assert read_memory_report(json.dumps({"Record": records})) == {"cbuf": 24576 + 8192}


def test_overflows_keep_the_largest_demand_of_each_memory():
    text = (
        'loc("k.mlir":2:3): error: ub overflow, requires 4194304 bits while 1572864 bits available! (reason)\n'
        "error: ub overflow, requires 2097152 bits while 1572864 bits available!\n"
        "error: cc overflow, requires 2097152 bits while 1048576 bits available!\n"
    )
    assert read_overflows(text) == (Overflow("UB", 524288, 196608), Overflow("L0C", 262144, 131072))
    assert read_overflows("all is well") == ()


def test_a_spec_needs_a_value_for_every_constexpr():
    with pytest.raises(ValueError, match=r"constexpr arguments \['BT'\] do not match constants \['BK'\]"):
        KernelSpec.of("op", "stage", "m:f", {"x": "*fp16", "BT": "constexpr"}, {"BK": 64})


def test_an_unknown_target_is_an_error():
    with pytest.raises(ValueError, match="got 'Ascend910B'"):
        target_named("Ascend910B")
