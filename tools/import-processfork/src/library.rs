//! A ProcessFork store on disk.
//!
//! ```text
//! images/<hex>.json            the images, one file each, named by their digest
//! *.pfimg                      likewise, named by people
//! blobs/sha256/<aa>/<hex>.zst  everything, the images too
//! ```

use super::image::{Image, MAX_BYTES};
use pfr_client::directory::{Root, blobs, layout};
use pfr_client::{Error, Result};
use pfr_schema::{Digest, ErrorCode};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Images in one store.
const MAX_IMAGES: usize = 100_000;
const IMAGES: &str = "images";
const BLOBS: &str = "blobs";
const EXTENSION: &str = "pfimg";

/// A store.
#[derive(Debug)]
pub(super) struct Library {
    path: PathBuf,
    root: Root,
}

/// Where an image's manifest lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In a file of the store.
    Within(PathBuf),
    /// In a file elsewhere.
    Elsewhere(PathBuf),
    /// Among the blobs.
    Blob(Digest),
}

/// An image, or why it is none.
#[derive(Debug)]
pub(super) struct Found {
    pub place: Place,
    pub image: Result<Image>,
}

impl Library {
    /// The store at `path`, and all its images; or the store around the file `path`, and the one
    /// image that it is. Ancestors that the store has come along.
    pub fn open(path: &Path) -> Result<(Self, Vec<Found>)> {
        let metadata = std::fs::metadata(path).map_err(Error::io("open", path))?;
        let (library, places) = if metadata.is_dir() {
            let library = Self::at(path)?;
            let places = library.list()?;
            (library, places)
        } else {
            let real = path.canonicalize().map_err(Error::io("open", path))?;
            let around = real.ancestors().skip(1).take(2).find(|dir| dir.join(BLOBS).is_dir());
            let reason = "no ProcessFork store is around it: there is no directory `blobs` beside it, nor one level up";
            let around = around.ok_or_else(|| Error::Refused { path: path.to_owned(), reason: reason.into() })?;
            (Self::at(around)?, vec![Place::Elsewhere(real)])
        };
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        for place in places {
            let image = library.image(&place);
            // A broken one counts as seen under its name: its children must not have it tried, and
            // told, again.
            let name = image.as_ref().map_or_else(|_| named(&place), |image| Some(image.digest));
            if name.is_none_or(|name| seen.insert(name)) {
                found.push(Found { place, image });
            }
        }
        library.add_ancestors(&mut found, &mut seen)?;
        Ok((library, found))
    }

    fn at(path: &Path) -> Result<Self> {
        let root = Root::open(path)?;
        if !path.join(BLOBS).is_dir() {
            return Err(Error::Refused { path: path.to_owned(), reason: "is no ProcessFork store: it has no directory `blobs`".into() });
        }
        Ok(Self { path: path.to_owned(), root })
    }

    /// Its blobs; a snapshot keeps them open for itself.
    pub fn blobs(&self) -> Result<Root> {
        Root::open(&self.path)
    }

    pub fn root(&self) -> &Root {
        &self.root
    }

    fn list(&self) -> Result<Vec<Place>> {
        let mut places = Vec::new();
        let with = |names: Vec<String>, directory: &str, extensions: &[&str]| -> Vec<Place> {
            let fits = |name: &String| Path::new(name).extension().is_some_and(|e| extensions.iter().any(|x| e == *x));
            names.into_iter().filter(fits).map(|name| Place::Within(Path::new(directory).join(name))).collect()
        };
        places.extend(with(self.root.names(Path::new(IMAGES))?, IMAGES, &["json", EXTENSION]));
        places.extend(with(self.root.names(Path::new(""))?, "", &[EXTENSION]));
        self.check_count(places.len())?;
        Ok(places)
    }

    fn check_count(&self, count: usize) -> Result<()> {
        let reason = || format!("has more than {MAX_IMAGES} images; give the files that are meant");
        if count > MAX_IMAGES { Err(Error::Refused { path: self.path.clone(), reason: reason() }) } else { Ok(()) }
    }

    fn add_ancestors(&self, found: &mut Vec<Found>, seen: &mut HashSet<Digest>) -> Result<()> {
        let mut next = 0;
        while let Some(Found { image, .. }) = found.get(next) {
            next += 1;
            let parents = image.as_ref().map(|image| image.parents.clone()).unwrap_or_default();
            for parent in parents {
                if !seen.insert(parent) {
                    continue;
                }
                let marker = PathBuf::from(IMAGES).join(format!("{}.json", parent.hex()));
                let place = if self.root.exists(&marker).unwrap_or(false) { Place::Within(marker) } else { Place::Blob(parent) };
                // A parent that is nowhere is no image that failed; its children say that it is
                // missing.
                if let Some(image) = self.bytes(&place).transpose().map(|bytes| bytes.and_then(|b| self.parse(&place, &b))) {
                    found.push(Found { place, image });
                    self.check_count(found.len())?;
                }
            }
        }
        Ok(())
    }

    fn image(&self, place: &Place) -> Result<Image> {
        let missing = || Error::Refused { path: self.path_of(place), reason: "is not there".into() };
        self.parse(place, &self.bytes(place)?.ok_or_else(missing)?)
    }

    fn parse(&self, place: &Place, bytes: &[u8]) -> Result<Image> {
        let path = self.path_of(place);
        let image = Image::parse(bytes).map_err(Error::document(&path))?;
        match named(place) {
            Some(digest) if digest != image.digest => {
                let reason = format!("its bytes hash to {}", image.digest);
                Err(Error::WrongBytes { path, digest, code: ErrorCode::DigestMismatch, reason })
            }
            _ => Ok(image),
        }
    }

    /// The bytes of an image's manifest; `None` if there is no such blob.
    pub fn bytes(&self, place: &Place) -> Result<Option<Vec<u8>>> {
        match place {
            Place::Within(relative) => self.root.read(relative, MAX_BYTES).map(Some),
            Place::Blob(digest) => blobs::read(&self.root, digest, MAX_BYTES),
            Place::Elsewhere(path) => {
                let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(Error::Refused { path: path.clone(), reason: "is no file".into() });
                };
                Root::open(parent)?.read(Path::new(name), MAX_BYTES).map(Some)
            }
        }
    }

    /// For messages.
    pub fn path_of(&self, place: &Place) -> PathBuf {
        match place {
            Place::Within(relative) => self.path.join(relative),
            Place::Elsewhere(path) => path.clone(),
            Place::Blob(digest) => self.blob_path(digest),
        }
    }

    /// For messages.
    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        layout::encoded(&self.path.join(layout::blob(digest)))
    }
}

/// The digest that an image's file is named by, if it is.
fn named(place: &Place) -> Option<Digest> {
    match place {
        Place::Blob(digest) => Some(*digest),
        Place::Within(path) | Place::Elsewhere(path) => format!("sha256:{}", path.file_stem()?.to_str()?).parse().ok(),
    }
}
