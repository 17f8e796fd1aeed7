# cmake -DIN=file -DOUT=file.c -DSYMBOL=name -P embed.cmake: the bytes of a file as a C array.
file(READ ${IN} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n"
       bytes "${bytes}")
file(WRITE ${OUT} "#include <stddef.h>\n\nextern const unsigned char ${SYMBOL}[];\nextern const size_t ${SYMBOL}_bytes;\n\nconst unsigned char ${SYMBOL}[] = {\n${bytes}};\nconst size_t ${SYMBOL}_bytes = sizeof ${SYMBOL};\n")
