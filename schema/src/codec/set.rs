//! Sets of codecs: those that a program reads, and those that a store takes.

use super::Codec;
use crate::error::{FormatError, shorten};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Header of a request for frames: the codecs that the client reads, comma-separated. Without it
/// they are [`Codecs::LEAST`].
pub const CODECS_HEADER: &str = "pf-codecs";

/// A set of codecs. `raw` and `zstd` are in each one: every program reads them.
///
/// Other programs may name codecs that this version does not know. [`Self::named`], and with it the
/// JSON form, leaves them out; [`FromStr`], which is for settings, refuses them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Codecs(u64);

impl Codecs {
    /// `raw` and `zstd`: what a program reads that does not say what it reads.
    pub const LEAST: Self = Self(bit(Codec::Raw) | bit(Codec::Zstd));

    /// All codecs of this version.
    pub const ALL: Self = {
        let (mut all, mut at) = (0, 0);
        while at < Codec::ALL.len() {
            all |= bit(Codec::ALL[at]);
            at += 1;
        }
        Self(all)
    };

    /// The codecs with these names, and [`Self::LEAST`].
    #[must_use]
    pub fn named<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let known = names.into_iter().filter_map(|name| Codec::named(name.trim()));
        known.fold(Self::LEAST, Self::with)
    }

    /// With one more codec.
    #[must_use]
    pub const fn with(self, codec: Codec) -> Self {
        Self(self.0 | bit(codec))
    }

    /// Whether a codec is in the set.
    #[must_use]
    pub const fn contains(self, codec: Codec) -> bool {
        self.0 & bit(codec) != 0
    }

    /// The codecs, by number.
    pub fn iter(self) -> impl Iterator<Item = Codec> {
        Codec::ALL.iter().copied().filter(move |codec| self.contains(*codec))
    }
}

/// Fails to compile for a number that has no bit.
const fn bit(codec: Codec) -> u64 {
    1 << codec as u8
}

impl Default for Codecs {
    fn default() -> Self {
        Self::LEAST
    }
}

/// Names, as the header has them.
impl fmt::Display for Codecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, codec) in self.iter().enumerate() {
            if at > 0 {
                f.write_str(", ")?;
            }
            f.write_str(codec.name())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Codecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Codecs({self})")
    }
}

/// `all`, `none` (but `raw` and `zstd`), or names, comma-separated.
impl FromStr for Codecs {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        match text {
            "all" => return Ok(Self::ALL),
            "none" => return Ok(Self::LEAST),
            _ => {}
        }
        text.split(',').try_fold(Self::LEAST, |set, name| {
            let codec = Codec::named(name.trim()).ok_or_else(|| FormatError::Name {
                what: "codec",
                found: shorten(name.trim().into()),
                reason: "known are bf16-bitmaps, bf16-huffman, f16-huffman, fp8-huffman; all, or none",
            })?;
            Ok(set.with(codec))
        })
    }
}

impl Serialize for Codecs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Codecs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let names = Vec::<String>::deserialize(deserializer)?;
        Ok(Self::named(names.iter().map(String::as_str)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_left_out_of_what_others_say_and_refused_in_settings() {
        let said = "raw, of-tomorrow,bf16-huffman , RAW,";
        assert_eq!(Codecs::named(said.split(',')), Codecs::LEAST.with(Codec::Bf16Huffman));
        let json: Codecs = serde_json::from_str(r#"["of-tomorrow","fp8-huffman"]"#).unwrap();
        assert_eq!(json, Codecs::LEAST.with(Codec::Fp8Huffman));
        for text in ["of-tomorrow", "", "bf16-huffman,", "bf16-huffman;raw", "None"] {
            assert!(text.parse::<Codecs>().is_err(), "{text:?}");
        }
        let two = Codecs::LEAST.with(Codec::Bf16Bitmaps).with(Codec::Bf16Huffman);
        for (text, set) in [("bf16-bitmaps, bf16-huffman", two), ("all", Codecs::ALL), ("none", Codecs::LEAST)] {
            assert_eq!(text.parse::<Codecs>().unwrap(), set);
        }
    }

    #[test]
    fn every_set_survives_as_a_header_and_as_json() {
        for set in 0..=Codecs::ALL.0 {
            let set = Codecs(set | Codecs::LEAST.0);
            assert_eq!(Codecs::named(set.to_string().split(',')), set);
            assert_eq!(serde_json::from_value::<Codecs>(serde_json::to_value(set).unwrap()).unwrap(), set);
            assert_eq!(set.iter().fold(Codecs::LEAST, Codecs::with), set);
        }
        assert_eq!(Codecs::ALL.iter().count(), Codec::ALL.len());
        assert_eq!(Codecs::default().to_string(), "raw, zstd");
    }
}
