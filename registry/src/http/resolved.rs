//! References that were resolved before the handler: the handler reads them instead of its path.

/// Path segments with the text to read instead, by the name of the segment. `tag~N` becomes a
/// digest here when only an upstream registry knows the way to it.
#[derive(Clone, Default)]
pub(crate) struct ResolvedRefs(Vec<(&'static str, String)>);

impl ResolvedRefs {
    /// The text to read instead of a segment.
    pub(crate) fn get(&self, segment: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| *name == segment).map(|(_, text)| text.as_str())
    }

    /// Replaces a segment.
    pub(crate) fn set(&mut self, segment: &'static str, text: String) {
        self.0.push((segment, text));
    }
}
