"""Languages by their ISO 639-1 code, as cards name them, and by their English name."""

from selfsynth.errors import UsageError

NAMES = dict(
    entry.split("=")
    for entry in """
af=Afrikaans am=Amharic ar=Arabic as=Assamese az=Azerbaijani ba=Bashkir be=Belarusian bg=Bulgarian
bm=Bambara bn=Bengali bo=Tibetan br=Breton bs=Bosnian ca=Catalan co=Corsican cs=Czech
cy=Welsh da=Danish de=German dz=Dzongkha ee=Ewe el=Greek en=English eo=Esperanto es=Spanish
et=Estonian eu=Basque fa=Persian fi=Finnish fo=Faroese fr=French fy=Frisian ga=Irish gd=Gaelic
gl=Galician gn=Guarani gu=Gujarati ha=Hausa he=Hebrew hi=Hindi hr=Croatian ht=Haitian hu=Hungarian
hy=Armenian id=Indonesian ig=Igbo is=Icelandic it=Italian ja=Japanese jv=Javanese ka=Georgian
kk=Kazakh km=Khmer kn=Kannada ko=Korean ku=Kurdish ky=Kyrgyz la=Latin lb=Luxembourgish lg=Ganda
ln=Lingala lo=Lao lt=Lithuanian lv=Latvian mg=Malagasy mi=Maori mk=Macedonian ml=Malayalam
mn=Mongolian mr=Marathi ms=Malay mt=Maltese my=Burmese ne=Nepali nl=Dutch no=Norwegian ny=Chichewa
oc=Occitan om=Oromo or=Odia pa=Punjabi pl=Polish ps=Pashto pt=Portuguese qu=Quechua rm=Romansh
rn=Kirundi ro=Romanian ru=Russian rw=Kinyarwanda sa=Sanskrit sd=Sindhi si=Sinhala sk=Slovak
sl=Slovenian sm=Samoan sn=Shona so=Somali sq=Albanian sr=Serbian st=Sesotho su=Sundanese sv=Swedish
sw=Swahili ta=Tamil te=Telugu tg=Tajik th=Thai ti=Tigrinya tk=Turkmen tl=Tagalog tn=Tswana to=Tongan
tr=Turkish ts=Tsonga tt=Tatar ug=Uyghur uk=Ukrainian ur=Urdu uz=Uzbek vi=Vietnamese wo=Wolof
xh=Xhosa yi=Yiddish yo=Yoruba zh=Chinese zu=Zulu
""".split()  # noqa: SIM905 - a list would take a hundred lines
)
"""English names by code."""


def code_of(language: str) -> str:
    """Return the code of a language that is named by its code or its English name.

    Raises:
        UsageError: it is neither.
    """
    wanted = language.strip().casefold()
    for code, name in NAMES.items():
        if wanted in (code, name.casefold()):
            return code
    raise UsageError(f"--language takes an ISO 639-1 code or an English name, not {language!r}")
