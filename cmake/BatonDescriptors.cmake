# bt_descriptors(out_var SYMBOL name PROTOS a.proto …): serialises .proto files (paths under proto/) and what they import
# into a FileDescriptorSet and makes a C source of it: `const unsigned char NAME[]; const size_t NAME_bytes;`.
# out_var receives the path of that source. For bt_grpc_reflection_add().
find_program(PROTOC NAMES protoc protoc-c REQUIRED) # either writes descriptor sets
set(BT_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/embed.cmake)

function(bt_descriptors out_var)
    cmake_parse_arguments(D "" "SYMBOL" "PROTOS" ${ARGN})
    set(root ${CMAKE_SOURCE_DIR}/proto)
    set(pb ${CMAKE_CURRENT_BINARY_DIR}/${D_SYMBOL}.pb)
    set(c ${CMAKE_CURRENT_BINARY_DIR}/${D_SYMBOL}.c)
    list(TRANSFORM D_PROTOS PREPEND ${root}/ OUTPUT_VARIABLE files)
    add_custom_command(
        OUTPUT ${c}
        COMMAND ${PROTOC} --proto_path=${root} --include_imports --descriptor_set_out=${pb} ${D_PROTOS}
        COMMAND ${CMAKE_COMMAND} -DIN=${pb} -DOUT=${c} -DSYMBOL=${D_SYMBOL} -P ${BT_EMBED_SCRIPT}
        DEPENDS ${files} ${BT_EMBED_SCRIPT}
        VERBATIM)
    set(${out_var} ${c} PARENT_SCOPE)
endfunction()
