# BT_CUDA: OFF; ON: kernels/cuda/ compiled by nvcc; EMULATED: the same sources for the CPU, see
# kernels/cuda/emulation/. Sets the flags of .cu files; kernels/CMakeLists.txt adds the sources.

set(BT_CUDA OFF CACHE STRING "CUDA backend: OFF, ON (nvcc) or EMULATED (on the CPU, for tests)")
set_property(CACHE BT_CUDA PROPERTY STRINGS OFF ON EMULATED)

if(BT_CUDA STREQUAL "EMULATED")
    enable_language(CXX)
    set(CMAKE_CXX_STANDARD 17)
    set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g1")
    # AddressSanitizer and UBSan look at the backend alone: device memory is heap, everything else runs at full speed.
    set(BT_CUDA_SANITIZE -fsanitize=address,undefined -fno-sanitize-recover=undefined)
    if(NOT BT_SANITIZE)
        add_link_options(-fsanitize=address,undefined)
    endif()
    # Kernels are C++ without its run time: programs stay C programs.
    set(BT_CU_OPTIONS -x c++ -Wall -Wextra -Wno-unknown-pragmas -fno-exceptions -fno-rtti -fno-omit-frame-pointer
        -ffp-contract=off)
elseif(BT_CUDA)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 100-virtual)
    endif()
    enable_language(CUDA)
    # Keeps what ptxas says of registers and spills, for the test cuda_usage.
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/cuda_usage.py run)
    find_package(CUDAToolkit 13.0 REQUIRED)
    set(CMAKE_CUDA_STANDARD 17)
    # cuBLASLt: of the toolkit, else the wheel that deploy/quickstart.sh --cuda puts into build/cuda-wheels. The headers are what a
    # build needs; the library is opened at run time (kernels/cuda/cuda_blas_lib.c). A wheel has no unversioned name.
    set(cublas_wheel ${CMAKE_SOURCE_DIR}/build/cuda-wheels/nvidia/cu13)
    find_path(BT_CUBLAS_INCLUDE cublasLt.h NO_DEFAULT_PATH PATHS ${CUDAToolkit_INCLUDE_DIRS} ${cublas_wheel}/include
        DOC "Folder of cublasLt.h of CUDA 13")
    find_library(BT_CUBLAS_LIBRARY NAMES cublasLt libcublasLt.so.13 NO_DEFAULT_PATH
        PATHS ${CUDAToolkit_LIBRARY_DIR} ${cublas_wheel}/lib DOC "libcublasLt.so.13")
    if(BT_CUBLAS_INCLUDE AND BT_CUBLAS_LIBRARY)
        set(BT_CUBLAS ON)
        file(STRINGS ${BT_CUBLAS_INCLUDE}/cublas_api.h cublas_version REGEX "^#define CUBLAS_VER_[A-Z]+ [0-9]+")
        string(REGEX REPLACE "[^;]*VER_[A-Z]+ " "" cublas_version "${cublas_version}")
        string(REPLACE ";" "." cublas_version "${cublas_version}")
        message(STATUS "cuBLAS ${cublas_version}: ${BT_CUBLAS_INCLUDE}, ${BT_CUBLAS_LIBRARY}")
    else()
        message(STATUS "cuBLAS: none in the CUDA toolkit nor in build/cuda-wheels (deploy/quickstart.sh --deps-only --cuda): "
            "own kernels only, no numerics class cuda-cublas")
    endif()
    # No contraction: what is fused says fmaf, so a device gives the bits of the emulation.
    set(BT_CU_OPTIONS --fmad=false -Xptxas=-v -Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas)
endif()
