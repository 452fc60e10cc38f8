# SPDX-License-Identifier: Apache-2.0
# Finds the CUDA toolkit as KVTIER_CUDA asks. Sets KVTIER_CUDA_FOUND (ON/OFF) and, when found,
# KVTIER_CUDA_INCLUDE_DIR (the folder of cuda_runtime.h and cuda_fp4.h).
include_guard(GLOBAL)

set(KVTIER_CUDA_FOUND OFF)
if(NOT KVTIER_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVTIER_CUDA=\"${KVTIER_CUDA}\": use AUTO, ON or OFF")
endif()
if(NOT KVTIER_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND)
    set(KVTIER_CUDA_FOUND ON)
    find_path(KVTIER_CUDA_INCLUDE_DIR cuda_runtime.h
              PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH REQUIRED)
  elseif(KVTIER_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVTIER_CUDA=ON, but no CUDA toolkit was found "
                        "(set CUDAToolkit_ROOT or CUDACXX, or use KVTIER_CUDA=OFF)")
  endif()
endif()
if(KVTIER_CUDA_FOUND)
  message(STATUS "CUDA: ${CUDAToolkit_VERSION}, headers in ${KVTIER_CUDA_INCLUDE_DIR}")
else()
  message(STATUS "CUDA: not used (KVTIER_CUDA=${KVTIER_CUDA})")
endif()
