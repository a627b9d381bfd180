//! The files of `deploy/`, held against the programs: settings that exist, objects that fit
//! together, metrics that are exported, and fleets that start with the environments of the
//! manifests.

mod compose;
mod files;
mod image;
mod kubernetes;
mod manual;
mod metrics;
mod programs;
mod sbom;
mod topology;
