# cmake -DIN=file -DOUT=file.c -DSYMBOL=name -P EmbedBytes.cmake: a C file with `const unsigned char name[]` and
# `const unsigned long name_len`.
file(READ ${IN} hex HEX)
string(LENGTH "${hex}" digits)
math(EXPR len "${digits} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" hex "${hex}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${OUT} "extern const unsigned char ${SYMBOL}[];\nextern const unsigned long ${SYMBOL}_len;\n"
    "const unsigned char ${SYMBOL}[] = {\n${bytes}\n0};\nconst unsigned long ${SYMBOL}_len = ${len};\n")
