# Build rules shared by every room: language level, warnings, sanitizers, and the three helpers
# bt_library, bt_program and bt_test.

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release)
endif()
# Assertions stay on in release (BT_ASSERT does not look at NDEBUG); -O2 keeps builds short.
set(CMAKE_C_FLAGS_RELEASE "-O2 -g1")
set(CMAKE_C_FLAGS_DEBUG "-O0 -g3")

option(BT_WERROR "Treat warnings as errors" OFF)
set(BT_SANITIZE "" CACHE STRING "Comma-separated sanitizers: address,undefined or thread")

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

include(GNUInstallDirs)
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(PROTOBUF_C REQUIRED IMPORTED_TARGET libprotobuf-c>=1.3)
pkg_check_modules(UV REQUIRED IMPORTED_TARGET libuv>=1.40)
pkg_check_modules(NGHTTP2 REQUIRED IMPORTED_TARGET libnghttp2>=1.43)
pkg_check_modules(OPENSSL REQUIRED IMPORTED_TARGET openssl>=3.0)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson>=2.13)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8>=10.36)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc>=2.4)
pkg_check_modules(UCX REQUIRED IMPORTED_TARGET ucx>=1.13)

add_library(bt_flags INTERFACE)
target_compile_options(bt_flags INTERFACE
    $<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wstrict-prototypes;-Wmissing-prototypes;-Wvla;-Wundef;-Wformat=2;-Wcast-qual;-fno-omit-frame-pointer;-ffp-contract=off>)
if(BT_WERROR)
    target_compile_options(bt_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
endif()
target_compile_definitions(bt_flags INTERFACE _GNU_SOURCE BT_VERSION="${PROJECT_VERSION}")
target_include_directories(bt_flags INTERFACE ${CMAKE_SOURCE_DIR})
if(BT_SANITIZE)
    target_compile_options(bt_flags INTERFACE
        $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${BT_SANITIZE};-fno-sanitize-recover=undefined>)
    target_link_options(bt_flags INTERFACE -fsanitize=${BT_SANITIZE})
endif()

# bt_library(name SOURCES a.c b.c [DEPS other rooms] [PRIVATE third-party targets])
# Defines the static library baton_<name>.
function(bt_library name)
    cmake_parse_arguments(L "" "" "SOURCES;DEPS;PRIVATE" ${ARGN})
    add_library(baton_${name} STATIC ${L_SOURCES})
    list(TRANSFORM L_DEPS PREPEND baton_)
    target_link_libraries(baton_${name} PUBLIC ${L_DEPS} PRIVATE bt_flags ${L_PRIVATE})
endfunction()

# bt_program(binary SOURCES main.c DEPS rooms [PRIVATE third-party targets])
function(bt_program name)
    cmake_parse_arguments(P "" "" "SOURCES;DEPS;PRIVATE" ${ARGN})
    add_executable(${name} ${P_SOURCES})
    list(TRANSFORM P_DEPS PREPEND baton_)
    target_link_libraries(${name} PRIVATE ${P_DEPS} bt_flags ${P_PRIVATE} m Threads::Threads)
    install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endfunction()

# bt_test(name SOURCES t.c DEPS rooms [PRIVATE targets] [LABELS l] [ARGS ...])
# A test program under <build>/tests/, run by ctest from the source root. Exit 0 pass, 77 skip.
function(bt_test name)
    cmake_parse_arguments(T "" "TIMEOUT" "SOURCES;DEPS;PRIVATE;LABELS;ARGS" ${ARGN})
    add_executable(${name} ${T_SOURCES})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
    list(TRANSFORM T_DEPS PREPEND baton_)
    target_link_libraries(${name} PRIVATE ${T_DEPS} bt_flags ${T_PRIVATE} m Threads::Threads)
    add_test(NAME ${name} COMMAND ${name} ${T_ARGS} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
    if(NOT T_TIMEOUT)
        set(T_TIMEOUT 120)
    endif()
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${T_TIMEOUT}
                         LABELS "${T_LABELS}")
endfunction()
