#!/usr/bin/env python3
"""Makes tests/golden/tokenizers: small tokenizers trained on the text below, a corpus of nasty strings, and what the
`tokenizers` package answers for them. Run in a virtual environment with tokenizers==0.23.3; the output is committed.

usage: make_tokenizer_fixtures.py [OUTPUT_DIR]
"""
import json
import os
import random
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.decoders import DecodeStream

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")

TEXT = """
Two runners share one race. The first runs the opening leg as fast as the lungs allow and hands the baton over; the
second keeps an even pace to the line. Neither could win alone, and the hand-off must not cost a step.
A prompt is read in one long breath, an answer is written word by word. Reading is bound by arithmetic, writing by the
width of the road to memory. Put each where it belongs and let the pages travel while the next layer is computed.
if (n_pages > n_free) { return BUSY; }  /* the queue is bounded */ for (i = 0; i < n; i++) sum += x[i] * y[i];
def relay(prompt, pages=16):\n    for page in pages:\n        yield page  # one at a time\n
In 1912 there were 4 runners, 400 metres each, 42.4 seconds; in 2012 it took 36.84. 100% of 1,024 pages = 16 KiB.
Der Läufer übergibt den Stab, ohne langsamer zu werden. Größe, Straße, Füße, Gefühl, Überholung, Äpfel und Öl.
Le coureur passe le témoin à l'élève; l'été, déjà, où êtes-vous? Ça va très bien, merci, à bientôt.
El corredor entrega el testigo mañana; ¿cuándo?, ¡ahora! El niño corre más rápido que el señor.
Бегун передаёт палочку следующему, и никто не теряет шага. Второй бежит ровно до самого конца.
走者はバトンを渡す。次の走者は最後まで走る。速さよりも渡し方が大事です。
跑步的人把接力棒交给下一个人，然后停下来休息。每一步都很重要。
العداء يسلم العصا إلى العداء التالي ثم يتوقف.
They'll say it's done, we've said we're late, I'd say you can't, he'd know she isn't. DON'T SHOUT, IT'S FINE.
""" * 3

NASTY = {
    "empty": "", "a": "a", "space": " ", "newline": "\n", "crlf": "\r\n", "nul": "a\0b\0\0", "tab": "\t\t x\t",
    "two_spaces": "  ", "spaces_word": "   word", "word_spaces": "word   ", "inner": "a  b   c    d",
    "lines": "one\ntwo\n\n three \n\n\n", "space_lines": " \n \n  \n", "prose": "The second runner keeps an even pace.",
    "caps": "DON'T SHOUT, it'S FINE, They'LL", "apostrophes": "'s 't 'll'd ''' 'x", "curly": "it’s “quoted” ‘so’",
    "digits": "1 22 333 4444 55555 1234567890", "numbers": "3.14e-10 0xFF 1,024 ½ ² Ⅳ ①", "other_digits": "١٢٣ १२३ １２３ 〇一二",
    "punct": "!?.,;:-_()[]{}<>|\\/@#$%^&*+=~`\"", "punct_runs": "... --- *** !!! ??? ###", "code": "if (x > 0) {\n\treturn x;\n}\n",
    "url": "https://example.org/a?b=c&d=%20#e", "path": "C:\\tmp\\x and /usr/lib/x.so.1", "json": '{"a": [1, 2.5, null], "b": "\\u00e9"}',
    "german": "Größe und Straße; Äpfel, Öl, Übergabe!", "french": "L'élève a déjà reçu le témoin, où êtes-vous?",
    "russian": "Бегун передаёт палочку.", "greek": "Η γρήγορη αλεπού", "japanese": "走者はバトンを渡す。", "chinese": "接力棒交给下一个人",
    "korean": "다음 주자에게", "arabic": "العداء يسلم العصا", "hebrew": "שלום עולם", "hindi": "अगला धावक", "thai": "นักวิ่งคนต่อไป",
    "nfc": "Ångström é ñ Ệ", "nfd": "A\u030angstro\u0308m e\u0301 n\u0303 E\u0323\u0302", "marks": "x\u0301\u0323\u0302\u0327y",
    "marks_wrong_order": "a\u0302\u0323 \u0301\u0327\u0301", "hangul_jamo": "\u1112\u1161\u11ab\u1100\u1173\u11af", "ligatures": "ﬁ ﬀ ﬃ Ǆ ㎏ ℌ",
    "turkish": "İstanbul ışık IĞDIR", "sharp_s": "ẞ ß SS", "emoji": "😀😃 👍🏽", "family": "👨‍👩‍👧‍👦", "flags": "🇩🇪🇯🇵", "zwj_text": "a\u200db\u200cc\u2060d\ufeff",
    "bidi": "\u202eabc\u202c \u200f", "exotic_spaces": "a\u00a0b\u2003c\u202fd\u3000e\u1680f\u180eg\u2028h\u0085i", "controls": "\x01\x02\x1b[0m\x7f\x80\x9f",
    "edges": "\x7f\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff", "replacement": "\ufffd\ufffd a\ufffd",
    "math": "𝔘𝟙 ∑ ≤ √2", "private": "\ue123\uf8ff", "unassigned": "\u0378\U000e0fff",
    "special": "a<|bos|>b <|eos|> c", "special_only": "<|bos|>", "special_twice": "<|eos|><|eos|>", "special_broken": "<|bos| <|eos <|bos|>> <<|eos|>",
    "spm_special": "<s>x</s> <unk><s>", "left": "a  <left> b<left>", "right": "a <right>  b<right>", "both": "x \n <both> \t y<both><both> ",
    "word_token": "wordy sword word word. (word)é wordé _word", "norm_token": "Ünorm unorm ünorm u\u0308norm UNORM",
    "longer": "<ab><abc><abcd><ab", "mark": "▁ literal ▁▁ block▁", "byte_names": "<0x0A><0xFF> <0x4", "byte_chars": "ĠĊĉ ġ Ń",
    "repeat_a": "a" * 300, "repeat_ab": "ab" * 150, "repeat_space": " " * 200, "repeat_newline": "\n" * 100, "repeat_eq": "=" * 150,
    "repeat_digit": "7" * 150, "repeat_cjk": "走" * 100, "repeat_word": "relay" * 60, "long_word": "Überholungsgefühlsstraßenläuferübergabe" * 4,
    "repeat_mark": "e" + "\u0301" * 60, "mixed_marks": "o" + "\u0301\u0323" * 40, "repeat_byte": "\U0010ffff" * 20,
}


def corpus():
    out = dict(NASTY)
    rng = random.Random(7)
    alphabet = list("abzAZ 01 \n\t\r'.,!?<>|_-éßüñÜ走は人кш\u0301\u200d\u00a0\u3000😀²١ﬁ▁") + ["'s", "<|eos|>", "word", " the", "<left>", "\r\n", "  "]
    for i in range(24):
        out[f"fuzz_{i}"] = "".join(rng.choice(alphabet) for _ in range(rng.randint(5, 60)))
    # Characters of Unicode 3.2 only: classes of newer ones depend on the age of each library's tables.
    old = [c for c in range(0x20, 0x30000) if not 0xd800 <= c < 0xe000 and unicodedata.ucd_3_2_0.category(chr(c)) != "Cn"]
    for i in range(6):
        out[f"fuzzcp_{i}"] = "".join(chr(rng.choice(old)) for _ in range(30))
    return out


def special(text, **kw):
    return AddedToken(text, special=True, normalized=False, **kw)


def train(tok, size, pre, alphabet=(), specials=()):
    tok.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=list(alphabet), special_tokens=list(specials))
    tok.train_from_iterator(TEXT.split("\n"), trainer)


def make_bytes():
    """Llama-3 style."""
    tok = Tokenizer(models.BPE(ignore_merges=True))
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    train(tok, 900, pre, pre_tokenizers.ByteLevel.alphabet())
    tok.add_special_tokens([special("<|bos|>"), special("<|eos|>"), special("<both>", lstrip=True, rstrip=True)])
    tok.add_tokens([AddedToken("<left>", lstrip=True, normalized=False), AddedToken("<right>", rstrip=True, normalized=False),
                    AddedToken("word", single_word=True, normalized=False), AddedToken("<ab>", normalized=False),
                    AddedToken("<abc>", normalized=False), AddedToken("<ab", normalized=False)])
    bos = tok.token_to_id("<|bos|>")
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])])
    tok.decoder = decoders.ByteLevel()
    return tok


def make_bytes_nfc():
    """Qwen and StarCoder style, with a prefix space, a suffix, and tokens that are found after normalizing."""
    tok = Tokenizer(models.BPE())
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)])
    train(tok, 600, pre, pre_tokenizers.ByteLevel.alphabet())
    tok.normalizer = normalizers.NFC()
    tok.add_special_tokens([special("<|bos|>"), special("<|eos|>")])
    tok.add_tokens([AddedToken("u\u0308norm", normalized=True), AddedToken("</s>", normalized=True, lstrip=True)])
    tok.post_processor = processors.TemplateProcessing(single="<|bos|> $A <|eos|> <|eos|>", special_tokens=[("<|bos|>", tok.token_to_id("<|bos|>")), ("<|eos|>", tok.token_to_id("<|eos|>"))])
    tok.decoder = decoders.ByteLevel()
    return tok


def spm_model(size, extra, **model):
    """A SentencePiece-style model: specials, then `extra` tokens, then what training found."""
    tok = Tokenizer(models.BPE())
    train(tok, size, pre_tokenizers.Metaspace(prepend_scheme="always"))
    trained = json.loads(tok.to_str())["model"]
    vocab = ["<unk>", "<s>", "</s>"] + extra + sorted(trained["vocab"], key=trained["vocab"].get)
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in trained["merges"]]
    out = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges, unk_token="<unk>", **model))
    out.add_special_tokens([special("<unk>"), special("<s>"), special("</s>")])
    return out


def make_spm():
    """Llama-2 style; the merges are rewritten as strings."""
    tok = spm_model(700, [f"<0x{i:02X}>" for i in range(256)], fuse_unk=True, byte_fallback=True)
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tok


def make_spm_meta():
    """Metaspace at the text's start only, unknowns that are not fused, no byte fallback."""
    tok = spm_model(500, [], fuse_unk=False)
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tok.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    tok.decoder = decoders.Metaspace(prepend_scheme="first")
    return tok


def make_odd():
    """Parts that real files have here and there, put together; no decoder."""
    tok = spm_model(400, [], fuse_unk=True)
    tok.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(Regex(r"\s{2,}"), " ")])
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.Digits(),
        pre_tokenizers.Split(Regex(r"[a-f]+"), "merged_with_next"), pre_tokenizers.Split("u", "contiguous", invert=True),
        pre_tokenizers.Split(Regex(r"\w+"), "isolated", invert=True), pre_tokenizers.CharDelimiterSplit("_")])
    tok.decoder = None
    return tok


def reference(tok, texts):
    empty = tok.encode("", add_special_tokens=True).ids
    probe = tok.encode("a", add_special_tokens=True).ids
    plain = tok.encode("a", add_special_tokens=False).ids
    at = next(i for i in range(len(probe)) if probe[i:i + len(plain)] == plain)
    assert empty == probe[:at] + probe[at + len(plain):]
    cases = []
    for name, text in texts.items():
        tok.encode_special_tokens = False
        ids = tok.encode(text, add_special_tokens=False).ids
        tok.encode_special_tokens = True
        as_text = tok.encode(text, add_special_tokens=False).ids
        case = {"name": name, "ids": ids}
        decoded = tok.decode(ids, skip_special_tokens=False)
        skipped = tok.decode(ids, skip_special_tokens=True)
        if as_text != ids:
            case["ids_specials_as_text"] = as_text
        if decoded != text:
            case["decoded"] = decoded
        if skipped != decoded:
            case["decoded_skip_special"] = skipped
        if len(ids) <= 40 and tok.decoder is not None:
            stream = DecodeStream(skip_special_tokens=False)
            try:
                case["stream"] = [stream.step(tok, i) for i in ids]
            except Exception:  # the package gives up on some texts with U+FFFD
                pass
        cases.append(case)
    return {"special_prefix_ids": probe[:at], "special_suffix_ids": probe[at + len(plain):], "cases": cases}


def dump(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/tokenizers"
    os.makedirs(out, exist_ok=True)
    texts = corpus()
    dump(f"{out}/corpus.json", [{"name": k, "text": v} for k, v in texts.items()])
    for name, make in [("bytes", make_bytes), ("bytes_nfc", make_bytes_nfc), ("spm", make_spm), ("spm_meta", make_spm_meta), ("odd", make_odd)]:
        tok = make()
        data = json.loads(tok.to_str())
        if name == "spm":
            data["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
        dump(f"{out}/{name}.tokenizer.json", data)
        dump(f"{out}/{name}.reference.json", reference(Tokenizer.from_str(json.dumps(data)), texts))


main()
