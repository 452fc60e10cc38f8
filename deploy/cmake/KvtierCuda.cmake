# SPDX-License-Identifier: Apache-2.0
# Finds the CUDA toolkit as KVTIER_CUDA asks. Sets KVTIER_CUDA_FOUND (ON/OFF) and, when found,
# KVTIER_CUDA_INCLUDE_DIR (the folder of cuda_runtime.h and cuda_fp4.h) and KVTIER_NVCC (the
# compiler of CUDA 13 or later, or KVTIER_NVCC-NOTFOUND). Device code is compiled by
# kvtier_add_cuda_library.
include_guard(GLOBAL)

set(KVTIER_CUDA_FOUND OFF)
set(KVTIER_CUDA_OBJECTS "" CACHE INTERNAL "Objects of nvcc")
if(NOT KVTIER_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVTIER_CUDA=\"${KVTIER_CUDA}\": use AUTO, ON or OFF")
endif()
if(NOT KVTIER_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND)
    set(KVTIER_CUDA_FOUND ON)
    find_path(KVTIER_CUDA_INCLUDE_DIR cuda_runtime.h
              PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH REQUIRED)
    if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 13.0)
      find_program(KVTIER_NVCC nvcc PATHS ${CUDAToolkit_BIN_DIR} NO_DEFAULT_PATH)
      # nvcc needs a host compiler that it knows; the project's own may be another.
      find_program(KVTIER_CUDA_HOST_COMPILER NAMES g++-12 g++ REQUIRED)
      mark_as_advanced(KVTIER_NVCC KVTIER_CUDA_HOST_COMPILER)
    endif()
  elseif(KVTIER_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVTIER_CUDA=ON, but no CUDA toolkit was found "
                        "(set CUDAToolkit_ROOT or CUDACXX, or use KVTIER_CUDA=OFF)")
  endif()
endif()
if(KVTIER_CUDA_FOUND)
  message(STATUS "CUDA: ${CUDAToolkit_VERSION}, headers in ${KVTIER_CUDA_INCLUDE_DIR}, "
                 "compiler ${KVTIER_NVCC}")
else()
  # An earlier configuration of this folder may have found one.
  unset(KVTIER_NVCC CACHE)
  message(STATUS "CUDA: not used (KVTIER_CUDA=${KVTIER_CUDA})")
endif()

# Every architecture, as machine code and without PTX: nothing is compiled when a kernel is loaded.
# A build for one machine may name only that machine's; cuda_machine_code_test wants all.
set(KVTIER_CUDA_ARCHITECTURES "80;86;89;90a;100a;103a;120a" CACHE STRING
    "Architectures that device code is compiled for, as nvcc names them")

# kvtier_add_cuda_library(name SOURCES files.cu... [PUBLIC libs...] [LAYER layer])
# A static library as kvtier_add_library makes it, from sources that nvcc compiles for all of
# KVTIER_CUDA_ARCHITECTURES; PUBLIC libraries are not seen by nvcc, which finds headers from the
# repository root. Sets KVTIER_CUDA_OBJECTS (cache, internal) to all objects so far. Not CMake's
# CUDA language: that would give nvcc the host's flags of every library it links, and configuring
# would compile test programs. Without KVTIER_NVCC this does nothing.
function(kvtier_add_cuda_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LAYER" "SOURCES;PUBLIC")
  _kvtier_reject_unparsed(kvtier_add_cuda_library)
  if(NOT KVTIER_NVCC)
    return()
  endif()
  set(architectures "")
  foreach(architecture IN LISTS KVTIER_CUDA_ARCHITECTURES)
    list(APPEND architectures
      -gencode "arch=compute_${architecture},code=sm_${architecture}")
  endforeach()
  set(objects "")
  foreach(source IN LISTS arg_SOURCES)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/${source}.o")
    add_custom_command(
      OUTPUT "${object}"
      # The objects stay uncompressed for the machine-code test, which reads them.
      COMMAND ${CMAKE_CUDA_COMPILER_LAUNCHER} "${KVTIER_NVCC}" -ccbin "${KVTIER_CUDA_HOST_COMPILER}"
              -std=c++20 --expt-relaxed-constexpr -O3 --compress-mode=none ${architectures}
              -I "${PROJECT_SOURCE_DIR}" -Xcompiler -fPIC,-Wall,-Wextra
              -MD -MF "${object}.d" -c "${CMAKE_CURRENT_SOURCE_DIR}/${source}" -o "${object}"
      DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${source}"
      DEPFILE "${object}.d"
      COMMENT "Building CUDA object ${source}"
      VERBATIM)
    list(APPEND objects "${object}")
  endforeach()
  add_library(kvtier_${name} STATIC ${objects})
  set_target_properties(kvtier_${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(kvtier_${name} PUBLIC kvtier_options ${arg_PUBLIC} CUDA::cudart_static)
  add_library(kvtier::${name} ALIAS kvtier_${name})
  kvtier_set_layer(kvtier_${name} "${arg_LAYER}")
  set(KVTIER_CUDA_OBJECTS ${KVTIER_CUDA_OBJECTS} ${objects} CACHE INTERNAL "Objects of nvcc")
endfunction()
