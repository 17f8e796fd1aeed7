#!/usr/bin/env python3
"""Writes tests/golden/templates/*.json: chat templates, their variables, and what Jinja2 makes of them.

usage: make_template_fixtures.py [OUT_DIR]      (needs: pip install jinja2==3.1.6)

The environment is set up the way model libraries render chat templates: immutable sandbox, trim_blocks, lstrip_blocks,
loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, and `generation` blocks that only print.
"""

import datetime
import json
import pathlib
import sys

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1738328645  # 2025-01-31 13:04:05 UTC


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        if any(str(k).startswith("_") for k in values):
            raise jinja2.exceptions.SecurityError("underscore")
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError("underscore")
        jinja2.utils.Namespace.__setitem__(self, name, value)


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(fmt):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(fmt)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    env.globals["namespace"] = Namespace
    return env


# ---- language constructs: (template, variables) ----

V = {
    "s": "Hello World", "u": "Grüße 👋🏽 日本", "ws": " \t\n x y \u00a0\u3000\n", "empty": "", "n": 7, "neg": -3, "f": 2.5,
    "t": True, "no": False, "nil": None, "l": [3, 1, 2], "ls": ["b", "A", "c", "a"], "ll": [[1, 2], [3, 4]],
    "d": {"b": 1, "a": "x", "items": [1], "C": None}, "multi": "one\ntwo\n\nthree\n",
    "users": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "bob", "age": 25, "tags": []},
              {"name": "Cid", "age": 30, "ok": True, "tags": ["y", "z"]}],
    "html": "<a href='x'>\"&\"</a>", "quote": "it's \"q\" \\ \n\t\x01\x7f\u200b",
}

EXPRESSIONS = """
s, n, f
1 + 2 * 3 - 4
(1 + 2) * 3
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 % -3, 2 ** 10, 2 ** -1, -2 ** 2
7 / 2
6 / 2
2.5 // 1, -2.5 // 1, 5.5 % 2, -5.5 % 2
1e3, 1.5e-7, 1e16, 123456789012345678.0, 0.1 + 0.2, 1e22, 5e-324, 1.0, -0.0
1_000_000
'a' 'b' "c"
'a' ~ 1 ~ none ~ true ~ 1.0 ~ [1, 'x'] ~ undefinedvar
'a' + 'b' + s + 'c' + u
'x' * 3, 3 * 'x', [1] * 2, 'x' * 0, 'x' * -1
[1, 2] + [3], (1, 2) + (3,)
[1, 'a', none, true, 2.0, [], {}, (), (1,), (1, 2), {'k': 'v', 2: [1]}]
[quote, "it's", 'say "x"', u, html]
{'a': 1}['a'], {'a': 1}.a, {'a': {'b': 2}}.a.b, {'a': 1}.zz is defined
l[0], l[-1], l[5] is defined, l[-9] is defined, l.0, l[1:], l[:2], l[::-1], l[::2], l[-2:], l[5:], l[1:0]
s[0], s[-1], s[1:4], s[::-1], s[::2], s[-3:], s[:-3], s[100:] , s[5] , s[99] is defined
u[0], u[6], u[-1], u[2:8], u[::-1], u|length
'abc'[::-2], 'abc'[2:0:-1], 'abc'[:-10:-1], 'abc'[5:1:-1]
(1, 2, 3)[1:], (1, 2, 3)[0]
nil.x is defined, nil[1] is defined, n.x is defined, d['nope'] is defined, d.nope is defined
d.items is defined, d['items'], d.b, d['b'], d.get('b'), d.get('z'), d.get('z', 5), d.keys() | list, d.values() | list, d.items() | list
d.items() | length, d | length, d | list
d.items()[0] is defined
'b' in d, 'z' in d, 'b' not in d, 1 in l, 9 in l, 'ell' in s, '' in s, 'x' not in s, (1, 2) in [(1, 2)]
[1,2] == [1,2], [1] == (1,), {'a': 1} == {'a': 1.0}, 1 == true, 0 == false, 1 == 1.0, '1' == 1, none == none, none == false
1 < 2, 2 <= 2, 'a' < 'b', 'a' < 'B', [1, 2] < [1, 3], 1 < 2 < 3, 1 < 2 > 3, 1 != 2, 3 >= 4, true > 0
not t, not no, not '', not 'a', not [], not 0, not none, not undefinedvar
t and no, t or no, no or 'x', 'x' and 'y', '' or [] or 'z', 0 and 1, not t or t, not (t or t)
'yes' if t else 'no', 'yes' if no else 'no', ('yes' if no), 'a' if no else 'b' if no else 'c'
undefinedvar, undefinedvar is defined, undefinedvar is undefined, undefinedvar == other, undefinedvar | default('dd'), undefinedvar | length, undefinedvar | list
undefinedvar ~ 'x', undefinedvar | upper, undefinedvar | trim, undefinedvar | join, undefinedvar | first is defined, undefinedvar | string
nil | default('dd'), nil | default('dd', true), '' | default('dd', boolean=true), 0 | d(5, true), 'v' | d('x')
n is number, f is number, t is number, s is string, l is string, d is mapping, l is mapping, nil is none, nil is not none
l is iterable, s is iterable, n is iterable, d is iterable, undefinedvar is iterable, nil is iterable
l is sequence, s is sequence, n is sequence, d is sequence, undefinedvar is sequence, (1,2) is sequence, d.items() is sequence, range(3) is sequence
t is boolean, n is boolean, t is true, n is true, no is false, 0 is false, n is integer, f is integer, t is integer, f is float
n is odd, n is even, 9 is divisibleby 3, 9 is divisibleby(4), n is eq 7, n is equalto(7), n == 7 and n is ne(8), n is gt 3, n is lessthan 3, n is ge(7), n is le 7
1 is in [1, 2], 'a' is in 'abc', 3 is not in [1, 2]
'abc' is lower, 'ABC' is upper, 'Abc' is lower, '123' is lower, '' is upper, 'ABC1' is upper
namespace is callable, s is callable, s.upper is callable, range is callable
none is sameas none, true is sameas(true), 1 is sameas true, l is sameas l
'upper' is filter, 'nope' is filter, 'odd' is test
s | upper, s | lower, s | capitalize, s | title, 'foo-bar (baz) it\\'s' | title, u | upper
'ß'.upper(), 'straße' | upper, 'ΑΣ ΣΑΣ' | lower, 'éa' | capitalize, 'ﬁx'.upper()
ws | trim, ws.strip(), ws.lstrip(), ws.rstrip(), '--x--' | trim('-'), 'xxaxx'.strip('x'), 'abcba'.strip('ab'), 'éxé'.strip('é')
s.startswith('He'), s.startswith('x'), s.endswith('ld'), s.startswith(('x', 'H')), s.startswith('lo', 3), s.endswith('o', 0, 5), ''.startswith(''), 'a'.startswith('', 5)
s.split(), s.split('o'), s.split('o', 1), s.split('zz'), ' a  b '.split(), ' a  b '.split(' '), 'a,b,c'.rsplit(',', 1), ' a b c '.rsplit(none, 1), ' a b c '.split(none, 1), ''.split(), ''.split('x'), 'a b'.split(maxsplit=1)
s.replace('o', '0'), s.replace('o', '0', 1), s | replace('l', 'L'), 'aaa' | replace('a', 'b', 2), 'abc'.replace('', '-'), 'x'|replace(1, 2)
s.find('o'), s.find('z'), s.rfind('o'), s.index('W'), s.count('l'), u.find('日'), 'aaa'.count('aa'), 'aaa'.count(''), s.find('o', 5), s.find('o', -3)
s.partition(' '), s.rpartition('o'), s.partition('zz'), s.rpartition('zz')
'a\\nb\\r\\nc\\rd'.splitlines(), 'a\\n'.splitlines(true), ''.splitlines(), '\\n'.splitlines(), multi.splitlines()
s.isalpha(), 'abc'.isalpha(), '12'.isdigit(), 'a1'.isalnum(), ' \\n'.isspace(), ''.isspace(), 'ABC'.isupper(), 'abc'.islower(), '½'.isnumeric(), '²'.isdigit(), '٣'.isdecimal(), 'é'.isascii()
'hello world'.title(), "they're bill's".title(), 'HeLLo'.swapcase(), 'hELLO'.capitalize(), 'ß'.casefold()
'42'.zfill(5), '-42'.zfill(5), 'x'.ljust(4) ~ '|', 'x'.rjust(4, '*'), 'x'.center(4, '*'), 'xy'.center(5, '*'), 'x' | center(5)
'abc'.removeprefix('a'), 'abc'.removesuffix('c'), 'abc'.removeprefix('x'), ','.join(['a', 'b']), ', '.join(ls)
'{} and {}'.format('a', 1), '{0}{1}{0}'.format('x', 'y'), '{name}!'.format(name='n'), '{{}}'.format()
'%s-%d' % ('a', 3), '%s' % 'x', '%5.2f|%-5s|%05d|%x|%%' % (1.5, 'ab', 42, 255), '%(k)s' % {'k': 1}, '%r' % 'q'
'%s %s' | format('a', 'b'), '%(a)s' | format(a=1), '%s' | format(none)
l | length, l | count, s | length, d | length, [] | length
l | first, l | last, s | first, s | last, u | last, [] | first is defined, [] | last is defined
l | sort, l | sort(reverse=true), ls | sort, ls | sort(case_sensitive=true), users | sort(attribute='age') | map(attribute='name') | list
users | sort(attribute='age,name', reverse=true) | map(attribute='name') | list
l | join, l | join(', '), users | join('|', attribute='name'), [none, true, 1.5] | join(' '), s | join('.')
l | min, l | max, l | sum, users | sum(attribute='age'), ls | min, ls | max, users | max(attribute='age') | string, [] | max is defined
l | reverse | list, s | reverse, l | list, s | list, d | list, range(5) | list, range(2, 8, 3) | list, range(5, 0, -2) | list
[1, 2, 1, 3, 2] | unique | list, ['a', 'A', 'b'] | unique | list, users | unique(attribute='age') | map(attribute='name') | list
users | map(attribute='name') | list, users | map(attribute='ok', default='-') | list, ls | map('upper') | list, ls | map('replace', 'a', 'z') | list, users | map(attribute='tags.0') | list | length
users | selectattr('ok') | list | length, users | selectattr('age', 'equalto', 30) | map(attribute='name') | list, users | rejectattr('age', '>', 26) | map(attribute='name') | join(','), users | selectattr('ok', 'defined') | list | length
l | select('odd') | list, l | reject('gt', 1) | list, ['', 'a', none] | select | list, [1, 'a'] | select('string') | list, users | selectattr('tags') | map(attribute='name') | list
d | dictsort, {'b': 2, 'A': 1} | dictsort(true), {'b': 1, 'a': 2} | dictsort(by='value'), {'b': 1, 'a': 2} | dictsort(reverse=true)
d | items | list, {'x': 1} | items | list
s | int, '42' | int, ' 42 ' | int, '4.7' | int, 'x' | int(9), '0x1f' | int(0, 16), '101' | int(base=2), 4.9 | int, true | int, '1_0' | int, none | int, '-5' | int
'1.5' | float, 'x' | float, 'x' | float(2.5), 3 | float, '1e3' | float, 'inf' | float
2.5 | round, 3.5 | round, 2.567 | round(2), 2.1 | round(0, 'ceil'), 2.9 | round(method='floor'), 7 | round, -2.5 | round
-3 | abs, neg | abs, 2.5 | abs
html | e ~ "|" ~ html | escape ~ "|" ~ html | safe
multi | indent, multi | indent(2, true), multi | indent(2, blank=true), multi | indent('> '), 'a' | indent(2, first=true)
s | wordcount, [1, 2, 3] | batch(2) | list, [1, 2, 3] | batch(2, 0) | list
d | tojson, u | tojson, quote | tojson, html | tojson, l | tojson, [1.0, 1e20, true, none, "é"] | tojson, [] | tojson, {} | tojson, (1, 2) | tojson
d | tojson(indent=2)
{'a': [1, {'b': []}], 'c': {}} | tojson(indent=4)
users | tojson(indent=1)
u | tojson(ensure_ascii=true), {'b': 1, 'a': 2} | tojson(sort_keys=true), [1, 2] | tojson(separators=(',', ':')), {'a': 1} | tojson(separators=(',', ':'))
{1: 2, none: 3, true: 4, 1.5: 5} | tojson
'\\x41\\u00e9\\U0001F600\\101\\n\\q'
dict(a=1, b=2), dict([('x', 1)]), dict({'y': 1}, z=2)
strftime_now('%Y-%m-%d'), strftime_now('%d %B %Y'), strftime_now('%H:%M:%S %a %b %j'), strftime_now('')
loop is defined, messages is defined
s.upper().lower().title()[0:3] ~ '!'
[1, 2, 3][-1] if l else 0
(l | length) - 1, l | length - 1
-n | abs, -(n) + 1, +n, - - n
n if n > 3 and n < 10 else 'out'
d.items() | map('first') | list, d.items() | map(attribute=0) | list
{'a': 1, 'a': 2}, {'x': l, 'y': d}
'a' in ['a'] and 'b' not in ['a'] or false
not 'a' in 'abc', not n is defined, not (n is defined)
n is defined and n, (s is string) ~ '', [s is string, n is not string]
l is defined and l | length > 2
d.a is string and d.b is number
users[0].name, users[0]['name'], users[-1].tags[1], users[0].tags.0, users[0].missing is defined
ll[0][1], ll[1][:1], ll | map('first') | list, ll | sum(start=[])
[*l] if false else 'nostar'
'\\u{'
"""

STATEMENTS = [
    ("{% for x in l %}{{ x }},{% endfor %}", {}),
    ("{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}"
     "{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}", {}),
    ("{% for x in l if x != 1 %}{{ loop.index }}/{{ loop.length }}={{ x }}{{ ' last' if loop.last }} {% endfor %}", {}),
    ("{% for x in [] %}a{% else %}none{% endfor %}|{% for x in l if x > 9 %}a{% else %}none{{ loop is defined }}{% endfor %}", {}),
    ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", {}),
    ("{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}", {}),
    ("{% for k in d %}{{ k }}{% endfor %}{% for c in 'héy' %}[{{ c }}]{% endfor %}{% for x in undefinedvar %}x{% endfor %}", {}),
    ("{% for x in 1, 2, 3 %}{{ x }}{% endfor %}", {}),
    ("{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", {}),
    ("{% for x in range(10) %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}", {}),
    ("{% for x in l %}{% for y in ls %}{{ loop.index }}{{ y }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ loop.index }};{% endfor %}", {}),
    ("{% set x = 1 %}{% for y in l %}{{ x }}{% set x = y %}{{ x }} {% endfor %}{{ x }}", {}),
    ("{% for y in l %}{{ z }}{% set z = y %}{{ z }} {% endfor %}{{ z is defined }}", {}),
    ("{% if t %}{% set x = 5 %}{% endif %}{{ x }}{% if no %}{% set y = 5 %}{% endif %}{{ y is defined }}", {}),
    ("{% set ns = namespace(a=1, b=[]) %}{% for y in l %}{% set ns.a = ns.a + y %}{% set ns.b = ns.b + [y] %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c is defined }}", {}),
    ("{% set ns = namespace({'x': 1}, y=2) %}{{ ns.x + ns.y }}{{ ns['x'] is defined }}", {}),
    ("{% set ns = namespace(found=false) %}{% for x in l if not ns.found %}{{ x }}{% if x == 1 %}{% set ns.found = true %}{% endif %}{% endfor %}", {}),
    ("{% set ns = namespace(found=false) %}{% for x in l if not ns.found %}{{ x }}{{ loop.last }}{% set ns.found = true %}{% endfor %}", {}),
    ("{% set a, b = 1, 'z' %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}{% set (e, g) = ll[0] %}{{ e + g }}", {}),
    ("{% set x %}a {{ n }}\n b{% endset %}[{{ x }}]{% set y | upper | trim %} {{ s }} {% endset %}[{{ y }}]", {}),
    ("{% set x %}{% set inner = 1 %}{{ inner }}{% endset %}{{ x }}{{ inner is defined }}", {}),
    ("{% if no %}a{% elif n == 7 %}b{% elif t %}c{% else %}d{% endif %}{% if no %}a{% elif no %}b{% else %}c{% endif %}{% if no %}x{% endif %}", {}),
    ("{% if no %}a{% else %}{% if t %}b{% endif %}c{% endif %}d", {}),
    ("{% macro m(a, b=2, c=a) %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, 3) }}|{{ m(1, c=5) }}|{{ m(b=1, a=0) }}|{{ m() }}", {}),
    ("{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}", {}),
    ("{% macro m(x) %}{% set y = x %}[{{ y }}{{ s }}]{% endmacro %}{{ m('q') }}{{ y is defined }}{{ m.name }}", {}),
    ("{% macro fact(k) %}{% if k <= 1 %}1{% else %}{{ k * (fact(k - 1) | int) }}{% endif %}{% endmacro %}{{ fact(10) }}", {}),
    ("{% macro m() %}{{ late }}{% endmacro %}{% set late = 3 %}{{ m() }}", {}),
    ("{% for x in l %}{% macro m() %}{{ x }}{{ loop.index }}{% endmacro %}{{ m() }}{% endfor %}", {}),
    ("{% macro box(title) %}<{{ title }}>{{ caller('z') }}{% endmacro %}{% call(v) box('T') %}in {{ v }}{{ n }}{% endcall %}", {}),
    ("{% macro m() %}{{ caller is defined }}{% if caller %}{{ caller() }}{% endif %}{% endmacro %}{{ m() }}{% call m() %}c{% endcall %}", {}),
    ("{% filter upper %}a {{ s }}{% endfilter %}{% filter replace('a', 'b') | upper %}banana{% endfilter %}", {}),
    ("{% with a = 1, b = n %}{{ a + b }}{% endwith %}{{ a is defined }}{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q is defined }}", {}),
    ("{% generation %}{{ s }}{% set g = 1 %}{% endgeneration %}{{ g is defined }}", {}),
    ("{% for x in [1, [2, [3]]] recursive %}{% if x is number %}{{ x }}@{{ loop.depth }}{% else %}({{ loop(x) }}){% endif %}{% endfor %}", {}),
    ("{% for x in l %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }} {% endfor %}", {}),
    ("{% set x = users | selectattr('age', 'equalto', 30) %}{{ x | list | length }}{{ x | list | length }}", {}),
    ("{% set x = l | map('string') %}{{ x | first }}{{ x | join('-') }}", {}),
    ("{{ users | map(attribute='name') | map('upper') | join(', ') }}{% print n %}", {}),
    ("{# comment #}a{#- c -#} b {#- x #}\nc\n{# y #}\nd", {}),
    ("a\n  {% if t %}\n    b\n  {% endif %}\nc\n", {}),
    ("a\n  {%- if t -%}\n    b\n  {%- endif -%}\nc\n\n", {}),
    ("a {% if t %} b {% endif %} c\n   {{ n }}\n  {{- n -}}  \n d", {}),
    ("a\n  {%+ if t %}x{% endif +%}\nb\n  {%+ if t +%}\ny{% endif %}\n", {}),
    ("x  {% if t %}  {% if t %}y{% endif %}  {% endif %}\n\n\nz", {}),
    ("{% raw %}{{ not }} {% if %}{% endraw %}|\n  {%- raw -%}  {{ a }}  {%- endraw -%}  b", {}),
    ("a\r\nb\rc{{ '\r\n' }}d\n\n", {}),
    ("{{ {'a': {'b': 1}}['a']['b'] }}{{ {} }}{{ '}}' }}{{ '%}' }}", {}),
    ("{{ '{{' }}{% set x = '{% endset %}' %}{{ x }}", {}),
    ("{%- for m in users %}\n  {%- if not loop.first %}, {% endif %}\n  {{- m.name }}\n{%- endfor %}\n", {}),
    ("{% for item in users %}\n  - {{ item.name }}\n{% endfor %}\nend", {}),
    ("{% if undefinedvar.x is defined %}{% endif %}", {}),
    ("{% if 'nofilter' is filter %}{{ s | nofilter }}{% else %}ok{% endif %}", {}),
    ("{% if d.nope %}a{% endif %}{% if d.nope is defined %}b{% endif %}{{ d.nope }}{{ d.nope | default('c') }}", {}),
    ("{% set messages = messages if messages is defined else [] %}{{ messages }}", {}),
    ("{% set loop_messages = users[1:] %}{{ loop_messages | length }}{% for m in loop_messages[::-1] %}{{ m.name }}{% endfor %}", {}),
    ("{{ a, b, c }}{{ (n) }}{{ (n,) }}", {}),
    ("{{ s.lower }}", {"skip": "text of a bound method"}),
    ("{% set d2 = dict(d, **{'extra': 1}) %}{{ d2.extra }}{{ [1, 2, 3] | length }}", {}),
    ("{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(**{'a': 3, 'b': 4}) }}", {}),
    # errors
    ("{{ nil[1:] }}", {}), ("{{ d[1:] }}", {}), ("{{ undefinedvar[1:] }}", {}), ("{{ d.items()[1:] }}", {}),
    ("{{ undefinedvar.x }}", {}), ("{{ undefinedvar['x'] }}", {}), ("{{ undefinedvar() }}", {}), ("{{ undefinedvar + 1 }}", {}),
    ("{{ 1 + undefinedvar }}", {}), ("{{ undefinedvar < 1 }}", {}), ("{{ -undefinedvar }}", {}), ("{{ undefinedvar | int }}", {}),
    ("{{ undefinedvar | tojson }}", {}), ("{{ nil.x.y }}", {}), ("{{ 'a' + 1 }}", {}), ("{{ 1 + 'a' }}", {}), ("{{ [1] + (1,) }}", {}),
    ("{{ none + 'x' }}", {}), ("{{ 1 in 5 }}", {}), ("{{ 1 in 'a' }}", {}), ("{{ 'a' < 1 }}", {}), ("{{ none < 1 }}", {}),
    ("{{ l.append(1) }}", {}), ("{{ d.update({}) }}", {}), ("{{ d.pop('a') }}", {}), ("{{ l.append is defined }}", {}),
    ("{{ s.nope() }}", {}), ("{{ n() }}", {}), ("{{ 5 | length }}", {}), ("{{ none | length }}", {}), ("{% for x in 5 %}{% endfor %}", {}),
    ("{% for x in none %}{% endfor %}", {}), ("{% for a, b in [1] %}{% endfor %}", {}), ("{% for a, b in [[1, 2, 3]] %}{% endfor %}", {}),
    ("{% set q.x = 1 %}", {}), ("{% set d.x = 1 %}", {}), ("{% set ns = namespace(_x=1) %}", {}), ("{% set ns = namespace() %}{% set ns._y = 1 %}", {}),
    ("{{ raise_exception('because ' ~ n) }}", {}), ("{% if t %}{{ s | nofilter }}{% endif %}", {}), ("{{ s | nofilter }}", {}),
    ("{{ s is nosuchtest }}", {}), ("{{ 1 / 0 }}", {}), ("{{ 1 // 0 }}", {}), ("{{ 1 % 0 }}", {}), ("{{ 's'.index('z') }}", {}),
    ("{{ s.split('') }}", {}), ("{{ ls | map('nofilter') | list }}", {}), ("{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", {}),
    ("{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", {}), ("{{ '%d' % 'x' }}", {}), ("{{ '%s %s' % 'x' }}", {}), ("{{ '%s' % (1, 2) }}", {}),
    ("{{ {[]: 1} }}", {}), ("{{ {} | tojson(indent='x') }}", {}), ("{{ range(100001) }}", {}), ("{{ range(1, 5, 0) }}", {}),
    ("{{ s | replace('a') }}", {}), ("{{ s | upper(1) }}", {}), ("{{ s.upper(1) }}", {}), ("{{ namespace | tojson }}", {}),
    ("{{ l | selectattr | list }}", {}), ("{{ l | map | list }}", {}), ("{{ 'a' | first('x') }}", {}), ("{{ [3, 'a'] | sort }}", {}),
    ("{{ x.y }}{# undefined #}", {}), ("{% for x in l %}{{ loop.nope.x }}{% endfor %}", {}),
    # syntax errors
    ("{{ 1 +", {}), ("{{ 1 + }}", {}), ("{% if t %}", {}), ("{% endif %}", {}), ("{% for x in l %}{% endif %}", {}), ("{{ 'abc }}", {}),
    ("{# x", {}), ("{% raw %}x", {}), ("{% nonsense %}", {}), ("{{ (1 }}", {}), ("{{ [1) }}", {}), ("{{ a b }}", {}), ("{{ }}", {}),
    ("{% set %}", {}), ("{% set x = %}", {}), ("{% set true = 1 %}", {}), ("{% break %}", {}), ("{% macro 1() %}{% endmacro %}", {}),
    ("{{ a.  }}", {}), ("{{ f(a=1, 2) }}", {}), ("{{ a ! b }}", {}), ("{{ 007 }}", {}), ("{{ n is }}", {}), ("{{ n is defined is defined }}", {}),
    ("{% for x l %}{% endfor %}", {}), ("{% if %}{% endif %}", {}), ("{{ 'a' | }}", {}), ("{% block x %}", {}), ("{{ \"\\x4\" }}", {}),
]

# ---- whole templates, in the styles models use ----

CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message['role'] != 'system' %}\n"
    "        {{- '<|im_start|>system\\nYou are a careful helper.<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
HEADER = (
    "{{- bos_token }}\n"
    "{%- if custom_tools is defined %}\n    {%- set tools = custom_tools %}\n{%- endif %}\n"
    "{%- if not date_string is defined %}\n    {%- set date_string = strftime_now('%d %b %Y') %}\n{%- endif %}\n"
    "{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}\n"
    "{#- the system message goes first -#}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content'] | trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|head|>system<|body|>\\n\\n' }}\n"
    "{%- if tools is not none %}\n    {{- 'Environment: tools\\n' }}\n{%- endif %}\n"
    "{{- 'Today: ' + date_string + '\\n\\n' }}\n"
    "{%- if tools is not none %}\n"
    "    {%- for t in tools %}\n        {{- t | tojson(indent=4) }}\n        {{- '\\n\\n' }}\n    {%- endfor %}\n"
    "{%- endif %}\n"
    "{{- system_message ~ '<|end|>' }}\n"
    "{%- for message in messages %}\n"
    "    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}\n"
    "        {{- '<|head|>' + message['role'] + '<|body|>\\n\\n' + message['content'] | trim + '<|end|>' }}\n"
    "    {%- elif 'tool_calls' in message %}\n"
    "        {%- if not message.tool_calls | length == 1 %}\n"
    "            {{- raise_exception('one tool call at a time, please') }}\n"
    "        {%- endif %}\n"
    "        {%- set call = message.tool_calls[0].function %}\n"
    "        {{- '<|head|>assistant<|body|>\\n\\n{\"name\": \"' + call.name + '\", \"parameters\": ' }}\n"
    "        {{- call.arguments | tojson }}\n        {{- '}<|end|>' }}\n"
    "    {%- else %}\n"
    "        {{- '<|head|>ipython<|body|>\\n\\n' }}\n"
    "        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}\n"
    "            {{- message.content | tojson }}\n"
    "        {%- else %}\n            {{- message.content }}\n        {%- endif %}\n"
    "        {{- '<|end|>' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|head|>assistant<|body|>\\n\\n' }}\n{%- endif %}\n"
)
INST = (
    "{%- if messages[0].role == 'system' %}{% set system_message = messages[0].content %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set loop_messages = messages %}{% endif %}\n"
    "{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}\n"
    "{%- set ns = namespace(index=0) %}\n"
    "{%- for message in loop_messages %}\n"
    "    {%- if not (message.role == 'tool' or message.tool_calls is defined) %}\n"
    "        {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}\n"
    "            {{- raise_exception('roles have to alternate: user, assistant, user, …') }}\n"
    "        {%- endif %}\n        {%- set ns.index = ns.index + 1 %}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{{- bos_token }}\n"
    "{%- for message in loop_messages %}\n"
    "    {%- if message.role == 'user' %}\n"
    "        {%- if tools is defined and tools is not none and message == user_messages[-1] %}\n"
    "            {{- '[TOOLS] [' }}\n"
    "            {%- for tool in tools %}\n"
    "                {%- set tool = tool.function %}\n"
    "                {{- '{\"type\": \"function\", \"function\": {' }}\n"
    "                {%- for key, val in tool.items() if key != 'return' %}\n"
    "                    {%- if val is string %}\n                        {{- '\"' + key + '\": \"' + val + '\"' }}\n"
    "                    {%- else %}\n                        {{- '\"' + key + '\": ' + val | tojson }}\n                    {%- endif %}\n"
    "                    {%- if not loop.last %}\n                        {{- ', ' }}\n                    {%- endif %}\n"
    "                {%- endfor %}\n                {{- '}}' }}\n"
    "                {%- if not loop.last %}\n                    {{- ', ' }}\n                {%- else %}\n                    {{- ']' }}\n                {%- endif %}\n"
    "            {%- endfor %}\n            {{- '[/TOOLS]' }}\n"
    "        {%- endif %}\n"
    "        {%- if loop.last and system_message is defined %}\n"
    "            {{- '[INST] ' + system_message + '\\n\\n' + message.content + '[/INST]' }}\n"
    "        {%- else %}\n            {{- '[INST] ' + message.content + '[/INST]' }}\n        {%- endif %}\n"
    "    {%- elif message.tool_calls is defined and message.tool_calls is not none %}\n"
    "        {{- '[CALLS] [' }}\n"
    "        {%- for tool_call in message.tool_calls %}\n"
    "            {%- set out = tool_call.function | tojson %}\n            {{- out[:-1] }}\n"
    "            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}\n"
    "                {{- raise_exception('ids of tool calls have nine characters') }}\n            {%- endif %}\n"
    "            {{- ', \"id\": \"' + tool_call.id + '\"}' }}\n"
    "            {%- if not loop.last %}\n                {{- ', ' }}\n            {%- else %}\n                {{- ']' + eos_token }}\n            {%- endif %}\n"
    "        {%- endfor %}\n"
    "    {%- elif message.role == 'assistant' %}\n        {{- ' ' + message.content | trim + eos_token }}\n"
    "    {%- elif message.role in ['tool', 'tool_results'] %}\n"
    "        {{- '[RESULT] {\"content\": ' + message.content | string + '}[/RESULT]' }}\n"
    "    {%- else %}\n        {{- raise_exception('only user, assistant, tool and a first system message') }}\n    {%- endif %}\n"
    "{%- endfor %}\n"
)
THINK = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n"
    "    {%- if messages[0].role == 'system' %}\n        {{- messages[0].content + '\\n\\n' }}\n    {%- endif %}\n"
    "    {{- \"# Functions\\n<tools>\" }}\n    {%- for tool in tools %}\n        {{- \"\\n\" }}\n        {{- tool | tojson }}\n    {%- endfor %}\n"
    "    {{- \"\\n</tools><|im_end|>\\n\" }}\n"
    "{%- else %}\n    {%- if messages[0].role == 'system' %}\n        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endif %}\n"
    "{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if ns.searching and message.role == \"user\" and message.content is string and not(message.content.startswith('<response>') and message.content.endswith('</response>')) %}\n"
    "        {%- set ns.searching = false %}\n        {%- set ns.last_query = index %}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.content is string %}\n        {%- set content = message.content %}\n    {%- else %}\n        {%- set content = '' %}\n    {%- endif %}\n"
    "    {%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n"
    "    {%- elif message.role == \"assistant\" %}\n"
    "        {%- set reasoning = '' %}\n"
    "        {%- if message.reasoning_content is string %}\n            {%- set reasoning = message.reasoning_content %}\n"
    "        {%- elif '</think>' in content %}\n"
    "            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
    "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n"
    "        {%- if loop.index0 > ns.last_query and (loop.last or (not loop.last and reasoning)) %}\n"
    "            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}\n"
    "        {%- else %}\n            {{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- endif %}\n"
    "        {%- if message.tool_calls %}\n            {%- for tool_call in message.tool_calls %}\n"
    "                {%- if (loop.first and content) or (not loop.first) %}\n                    {{- '\\n' }}\n                {%- endif %}\n"
    "                {%- if tool_call.function %}\n                    {%- set tool_call = tool_call.function %}\n                {%- endif %}\n"
    "                {{- '<call>\\n{\"name\": \"' ~ tool_call.name ~ '\", \"arguments\": ' }}\n"
    "                {%- if tool_call.arguments is string %}\n                    {{- tool_call.arguments }}\n                {%- else %}\n                    {{- tool_call.arguments | tojson }}\n                {%- endif %}\n"
    "                {{- '}\\n</call>' }}\n            {%- endfor %}\n        {%- endif %}\n        {{- '<|im_end|>\\n' }}\n"
    "    {%- elif message.role == \"tool\" %}\n"
    "        {%- if loop.first or (messages[loop.index0 - 1].role != \"tool\") %}\n            {{- '<|im_start|>user' }}\n        {%- endif %}\n"
    "        {{- '\\n<response>\\n' ~ content ~ '\\n</response>' }}\n"
    "        {%- if loop.last or (messages[loop.index0 + 1].role != \"tool\") %}\n            {{- '<|im_end|>\\n' }}\n        {%- endif %}\n"
    "    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}\n"
)
TURNS = (
    "{{ bos_token }}\n{%- set parts = namespace(prefix='') -%}\n"
    "{%- if messages and messages[0]['role'] in ('system', 'developer') -%}\n"
    "    {%- if messages[0]['content'] is string -%}\n        {%- set parts.prefix = messages[0]['content'] ~ '\n\n' -%}\n"
    "    {%- else -%}\n        {%- set parts.prefix = messages[0]['content'][0]['text'] ~ '\n\n' -%}\n    {%- endif -%}\n"
    "    {%- set turns = messages[1:] -%}\n{%- else -%}\n    {%- set turns = messages -%}\n{%- endif -%}\n"
    "{%- for message in turns -%}\n"
    "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n        {{ raise_exception(\"user and model take turns\") }}\n    {%- endif -%}\n"
    "    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\n"
    "    {{ '<turn>' + role + '\n' + (parts.prefix if loop.first else '') }}\n"
    "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n"
    "    {%- elif message['content'] is iterable -%}\n        {%- for item in message['content'] -%}\n"
    "            {%- if item['type'] == 'image' -%}\n                {{ '<image>' }}\n"
    "            {%- elif item['type'] == 'text' -%}\n                {{ item['text'] | trim }}\n            {%- endif -%}\n        {%- endfor -%}\n"
    "    {%- else -%}\n        {{ raise_exception('content of an unknown kind') }}\n    {%- endif -%}\n"
    "    {{ '</turn>\n' }}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n    {{ '<turn>model\n' }}\n{%- endif -%}\n"
)
SCHEMA = (
    "{%- macro type_of(spec) -%}\n"
    "    {%- if spec.enum is defined -%}{{ spec.enum | map('tojson') | join(' | ') }}\n"
    "    {%- elif spec.type == 'array' -%}{{ type_of(spec['items']) if spec['items'] is defined else 'any' }}[]\n"
    "    {%- elif spec.type == 'object' -%}\n"
    "        {%- if spec.properties -%}{\n{% for name, sub in spec.properties | dictsort -%}\n"
    "            {{ '  ' ~ name ~ ('' if name in spec.required | default([]) else '?') ~ ': ' ~ type_of(sub) ~ ',' }}\n"
    "        {% endfor -%} }{%- else -%}object{%- endif -%}\n"
    "    {%- elif spec.type is string -%}{{ {'integer': 'number'}.get(spec.type, spec.type) }}\n"
    "    {%- elif spec.type is sequence -%}{{ spec.type | join(' | ') }}{%- else -%}any{%- endif -%}\n"
    "{%- endmacro -%}\n"
    "{%- for tool in tools or [] -%}\n"
    "{%- set f = tool.function -%}\n"
    "// {{ f.description | default('', true) | replace('\\n', '\\n// ') }}\ntype {{ f.name }} = (_: {{ type_of(f.parameters) }}) => any;\n"
    "{% endfor %}\n"
    "{%- for m in messages %}{% generation %}{{ m.role | upper }}: {{ m.content | default('', true) | trim | indent(2) }}{% endgeneration %}\n{% endfor %}"
)

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather now.\nIn a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Größe <b>"}, "unit": {"enum": ["c", "f"]},
                                         "days": {"type": "array", "items": {"type": "integer"}}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}, "return": "x"}},
]
CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Was ist 2+2?  "}],
    "multi": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, {"role": "user", "content": "  C\n\n"}],
    "think": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, {"role": "user", "content": "r"},
              {"role": "assistant", "content": "<think>\nhm 2\n</think>\n\nno"}],
    "tool": [{"role": "user", "content": "weather?"},
             {"role": "assistant", "content": None, "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}]},
             {"role": "tool", "content": "{\"t\": 21.5}"}, {"role": "assistant", "content": "21.5°"}],
    "tools2": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "two", "tool_calls": [
        {"function": {"name": "a", "arguments": "{}"}}, {"function": {"name": "b", "arguments": {}}}]},
        {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
    "parts": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " look "}]}],
    "wrong": [{"role": "assistant", "content": "first"}, {"role": "user", "content": "second"}],
    "empty": [],
}


def render(env, template, variables):
    try:
        return {"text": env.from_string(template).render(**variables)}
    except Exception as e:  # every failure is an outcome
        return {"error": f"{type(e).__name__}: {e}"[:200]}


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "tests/golden/templates")
    out.mkdir(parents=True, exist_ok=True)
    env = environment()
    cases = [{"template": "{{ " + e + " }}", **render(env, "{{ " + e + " }}", V)} for e in EXPRESSIONS.strip().split("\n")]
    cases += [{"template": t, **render(env, t, V)} for t, opts in STATEMENTS if "skip" not in opts]
    styles = {"chatml": CHATML, "header": HEADER, "inst": INST, "think": THINK, "turns": TURNS, "schema": SCHEMA}
    chats = []
    for style, template in styles.items():
        for name, messages in CONVERSATIONS.items():
            for tools in (None, TOOLS):
                for gen in (False, True):
                    v = {"messages": messages, "tools": tools, "add_generation_prompt": gen, "bos_token": "<s>", "eos_token": "</s>"}
                    if gen and tools is None and style == "think":
                        v["enable_thinking"] = False
                    chats.append({"style": style, "name": f"{style}/{name}/{'tools' if tools else 'plain'}/{int(gen)}", "conversation": name,
                                  "tools": tools is not None, "variables": {k: x for k, x in v.items() if k not in ("messages", "tools")},
                                  **render(env, template, v)})
    head = {"generator": f"jinja2 {jinja2.__version__}", "now_unix": NOW}

    def write(name, obj, key):
        lines = ",\n".join(json.dumps(c, ensure_ascii=False) for c in obj.pop(key))
        rest = json.dumps(obj, ensure_ascii=False)[:-1]
        (out / name).write_text(f"{rest}, \"{key}\": [\n{lines}\n]}}\n", encoding="utf-8")

    write("language.json", {**head, "variables": V, "cases": cases}, "cases")
    write("chats.json", {**head, "styles": styles, "conversations": CONVERSATIONS, "tools": TOOLS, "cases": chats}, "cases")
    print(len(cases), "language cases,", sum("error" in c for c in cases), "errors;", len(chats), "chats,", sum("error" in c for c in chats), "errors")


if __name__ == "__main__":
    main()
